"""Patch: a worker starts on CPU although numba was imported before.

Target: ``vars`` as ``vllm.triton_utils.dispatcher`` calls it.
Why: without Triton vLLM looks through the attributes of all modules for kernels to replace, and takes
``vars`` of each to be a dictionary.  numba's library of LLVM functions has another ``__dict__``, at which
the search fails; the module of Kimi-Linear's model imports numba, and is read before the worker starts.
Until: vLLM asks for dictionaries alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.triton_utils import dispatcher

    require_parameters(dispatcher._rebind_kernels, "overrides")
    dispatcher.vars = _mapping


def _mapping(value: Any) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}
