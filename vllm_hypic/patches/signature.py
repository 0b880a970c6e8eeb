"""Fails loudly when vLLM's code is not what a patch was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class PatchError(RuntimeError):
    """The installed vLLM differs from the one that a patch fits."""


def require_parameters(function: Callable[..., Any], *expected: str) -> None:
    """Raise :class:`PatchError` unless ``function`` has the parameters ``expected``, in this order."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise PatchError(
            f"vllm-hypic patches {function.__module__}.{function.__qualname__}{expected}, "
            f"but this vLLM has {found}; vllm-hypic supports vLLM 0.32"
        )
