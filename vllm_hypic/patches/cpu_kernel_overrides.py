"""Patch: a worker starts on CPU even if numba was imported before.

Target: ``vars`` as ``vllm.triton_utils.dispatcher`` calls it.
Why: without Triton, vLLM searches the attributes of all modules for kernels to replace, and takes ``vars`` of
each attribute for a dictionary.  The search fails at numba's library of LLVM functions, whose ``__dict__`` is
no dictionary.  The module of Kimi-Linear's model imports numba, and loads before the worker starts.
Until: vLLM checks that ``vars`` gives a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.triton_utils import dispatcher

    require_parameters(dispatcher._rebind_kernels, "overrides")
    dispatcher.vars = _mapping


def _mapping(value: Any) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}
