"""Carries what the prompts of a request become, past vLLM's checks and logs, to where prompts are rendered.

vLLM validates, logs and repeats a request as its client wrote it, with the public texts of its parts.  What
stands for them instead takes the request's own context: other requests have another one.

Imports neither vLLM nor torch.
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
    """``written`` stands for ``public``: two JSON values that differ in texts alone, and are the messages of
    a ``chat``, or else prompts as vLLM's renderer gets them.  ``seal`` is that of ``written``."""

    chat: bool
    public: Any
    written: Any
    seal: Seal
    done: bool = False

    def of(self, value: Any) -> Any:
        """``value``, which vLLM made of ``public``, with the texts of ``written``."""
        self.done = True
        return _put(value, self.public, self.written)


_current: ContextVar[Rewriting | None] = ContextVar("rewriting", default=None)


def current(*, chat: bool) -> Rewriting | None:
    """What the messages, or else the prompts, of the request that is handled here become."""
    found = _current.get()
    return found if found is not None and found.chat == chat else None


def forgotten() -> bool:
    """Whether the request that is handled here was to be rewritten, and nobody did so."""
    found = _current.get()
    return found is not None and not found.done


@contextmanager
def carrying(rewriting: Rewriting | None) -> Iterator[None]:
    """Requests that are handled inside are rewritten so."""
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
        return value  # a NaN, which is not its own equal
    if value != public:
        raise RuntimeError("vLLM changed a text with parts or segment ids before it was rendered")
    return written
