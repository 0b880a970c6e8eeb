"""Fails loudly when vLLM's code is not what a patch was written for."""

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
    """Decorator: calls of ``owner``'s function ``stock``, which must have these parameters, become calls of
    what is decorated, with ``stock`` before the arguments.  Not a second time."""

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
