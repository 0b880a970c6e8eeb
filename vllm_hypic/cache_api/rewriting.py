"""Carries the rewritten prompts of a request, past vLLM's checks and logs, to the rendering of prompts.

vLLM validates, logs and repeats a request as its client wrote it, with the public texts of its parts.  The
rewritten texts travel in a context variable of the request, apart from all other requests.

The module imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .forms import Seal


@dataclass
class Rewriting:
    """Replacement of ``public`` by ``written``, two JSON values that differ only in texts.  With ``chat`` the
    values are messages, else prompts as vLLM's renderer gets them.  ``seal`` seals tokens in ``written``."""

    chat: bool
    public: Any
    written: Any
    seal: Seal
    done: bool = False

    def of(self, value: Any) -> Any:
        """Return ``value``, which vLLM made from ``public``, with the texts of ``written``."""
        self.done = True
        return _put(value, self.public, self.written)


_current: ContextVar[Rewriting | None] = ContextVar("rewriting", default=None)


def current(*, chat: bool) -> Rewriting | None:
    """Return the rewriting of the present request's messages (``chat``) or prompts, or ``None``."""
    found = _current.get()
    return found if found is not None and found.chat == chat else None


def forgotten() -> bool:
    """Whether the present request has a rewriting that has not been applied."""
    found = _current.get()
    return found is not None and not found.done


@contextmanager
def carrying(rewriting: Rewriting | None) -> Iterator[None]:
    """Rewrite the requests that are handled inside the ``with`` block."""
    token = _current.set(rewriting)
    try:
        yield
    finally:
        _current.reset(token)


def _put(value: Any, public: Any, written: Any) -> Any:
    if public == written:
        return value
    if isinstance(public, dict):
        return {**value, **{k: _put(value[k], public[k], w) for k, w in written.items() if public[k] != w}}
    if isinstance(public, list):
        return [_put(*found) for found in zip(value, public, written, strict=True)]
    if not isinstance(public, str):
        return value  # a NaN is not equal to itself
    if value != public:
        raise RuntimeError("vLLM changed a text with parts or segment ids before it was rendered")
    return written
