"""The C++ kernels in ``csrc/``, as operators of ``torch.ops.vllm_hypic``.  Optional: without them the PyTorch
versions run.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

BUILD = "pip install --no-build-isolation --no-deps . (with g++ installed) builds them"


@cache
def missing() -> str | None:
    """Why the C++ kernels cannot be used in this process, or ``None``: they can.  Loads them once."""
    try:
        importlib.import_module("vllm_hypic._C")
        torch.ops.vllm_hypic.isa()
    except ImportError as e:
        return f"not built ({e}); {BUILD}"
    except RuntimeError as e:
        # An instruction set that this machine lacks, or HYPIC_ISA naming none.
        return str(e).splitlines()[0]
    return None


def describe() -> str:
    """One line for the log: what runs on this machine."""
    reason = missing()
    return f"C++ kernels ({torch.ops.vllm_hypic.isa()})" if reason is None else f"PyTorch kernels: {reason}"
