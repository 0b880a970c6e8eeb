"""The C++ kernels in ``csrc/``: functions of the module ``vllm_hypic._C``.  Optional: without it the PyTorch
versions run, unless ``HYPIC_ISA`` asks for the kernels of one instruction set.

``python -m vllm_hypic.backends.ops.extension`` says which kernels a process on this machine uses; it exits
with 1 and the reason where ``HYPIC_ISA`` asks for some that it cannot use.
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
    """The module; :func:`missing` says whether it can be used."""
    return importlib.import_module("vllm_hypic._C")


@cache
def missing() -> str | None:
    """Why the C++ kernels cannot be used in this process, or ``None``: they can.  Loads them once.

    Raises :class:`ConfigError` where ``HYPIC_ISA`` names an instruction set that is unknown or that this
    machine lacks, or where it is set and the kernels are not built.
    """
    try:
        kernels().isa()
    except ImportError as e:
        reason = f"not built ({e}); {BUILD}"
        if isa := os.environ.get("HYPIC_ISA"):
            raise ConfigError(f"hypic: HYPIC_ISA={isa}: the C++ kernels are {reason}") from e
        return reason
    except RuntimeError as e:
        # An instruction set that this machine lacks, or HYPIC_ISA naming none.
        reason = str(e).splitlines()[0]
        if os.environ.get("HYPIC_ISA"):
            raise ConfigError(f"hypic: {reason}") from e
        return reason
    return None


def describe() -> str:
    """One line for the log: what runs on this machine.  Raises as :func:`missing` does."""
    reason = missing()
    return f"C++ kernels ({kernels().isa()})" if reason is None else f"PyTorch kernels: {reason}"


if __name__ == "__main__":
    try:
        print(describe())
    except ConfigError as e:
        raise SystemExit(str(e)) from None
