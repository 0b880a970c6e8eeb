"""Replaces vLLM's functions, and raises an error if a function differs from the patch's expectation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
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


def replaces(owner: Any, stock: Callable[..., Any], *expected: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that replaces ``owner``'s function ``stock`` by the decorated function.
    Calls pass ``stock`` before the arguments.  ``stock`` must have the parameters ``expected``; otherwise the
    decorator raises :class:`PatchError`.  The decorator leaves a function that is already replaced alone."""

    def put(ours: Callable[..., Any]) -> None:
        if getattr(stock, "_hypic", False):
            return
        require_parameters(stock, *expected)

        @wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(stock, *args, **kwargs)

        call._hypic = True  # type: ignore[attr-defined]
        setattr(owner, stock.__name__, call)

    return put
