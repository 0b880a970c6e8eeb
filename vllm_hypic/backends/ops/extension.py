"""Access to the C++ kernels in ``csrc/``, functions of the optional module ``vllm_hypic._C``.  Without the
module the PyTorch versions run, unless ``HYPIC_ISA`` asks for the kernels of one instruction set.

The command ``python -m vllm_hypic.backends.ops.extension`` names the kernels that a process on this machine
uses.  The command exits with 1 and the reason if ``HYPIC_ISA`` asks for kernels that the process cannot use.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch  # noqa: F401 - the module needs its libraries

from ...errors import ConfigError

BUILD = "pip install --no-build-isolation --no-deps . (with g++ installed) builds them"


@cache
def kernels() -> ModuleType:
    """Import and return the C++ module; :func:`missing` says whether the module works."""
    return importlib.import_module("vllm_hypic._C")


@cache
def missing() -> str | None:
    """Load the C++ kernels once; return the reason why the process cannot use them, else ``None``.

    Raises :class:`ConfigError` if ``HYPIC_ISA`` names an instruction set that is unknown or that this machine
    lacks, and if ``HYPIC_ISA`` is set and the kernels are not built.
    """
    try:
        kernels().isa()
    except ImportError as e:
        reason = f"not built ({e}); {BUILD}"
        if isa := os.environ.get("HYPIC_ISA"):
            raise ConfigError(f"hypic: HYPIC_ISA={isa}: the C++ kernels are {reason}") from e
        return reason
    except RuntimeError as e:
        # The machine lacks the instruction set, or HYPIC_ISA names an unknown one.
        reason = str(e).splitlines()[0]
        if os.environ.get("HYPIC_ISA"):
            raise ConfigError(f"hypic: {reason}") from e
        return reason
    return None


def describe() -> str:
    """Return a line for the log that names the kernels of this machine.  Raises as :func:`missing` does."""
    reason = missing()
    return f"C++ kernels ({kernels().isa()})" if reason is None else f"PyTorch kernels: {reason}"


if __name__ == "__main__":
    try:
        print(describe())
    except ConfigError as e:
        raise SystemExit(str(e)) from None
