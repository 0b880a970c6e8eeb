"""Coroutines without an event loop: the thread that brings a result runs the waiting coroutines at once.

So a fetch or a write reads from top to bottom, and no thread stands between a tier's thread and a reader.
Nothing here locks: callers hold the one lock that guards the state of the coroutines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")


class Unavailable(Exception):
    """The result that a task awaits will not come; the text says why."""


class Future(Generic[T]):
    """A value or an error, present or to come; the first result counts.  Any number of tasks may wait."""

    __slots__ = ("_error", "_value", "_waiting", "done")
    _value: T

    def __init__(self) -> None:
        self.done = False
        self._error: Exception | None = None
        self._waiting: list[Task[Any]] = []

    def set(self, value: T) -> None:
        """End with a value; the waiting tasks run on before this call returns."""
        if not self.done:
            self._value = value
            self._end()

    def fail(self, error: Exception) -> None:
        """End with an error, which the waiting tasks raise."""
        if not self.done:
            self._error = error
            self._end()

    def _end(self) -> None:
        self.done = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.run_on(self)

    def __await__(self) -> Generator[Future[Any], None, T]:
        if not self.done:
            yield self
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # otherwise error and traceback keep each other, and the object's bytes, alive


class Task(Future[T]):
    """Runs a coroutine until it waits; then the thread that ends the awaited future runs it on.

    An :class:`Unavailable` that the coroutine raises ends the task.  Any other exception is a programming
    error: the task logs the exception, and nothing but the task ends.
    """

    __slots__ = ("_awaited", "_coroutine")

    def __init__(self, coroutine: Coroutine[Future[Any], None, T]) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._awaited: Future[Any] | None = None
        self._run(coroutine.send, None)

    def run_on(self, awaited: Future[Any]) -> None:
        """Resume the coroutine if the task still waits for ``awaited``, which has ended."""
        if self._awaited is awaited:
            self._run(self._coroutine.send, None)

    def interrupt(self, error: Exception) -> None:
        """Raise ``error`` where the task waits.  The call has no effect on a task that has ended."""
        if self._awaited is not None:
            self._run(self._coroutine.throw, error)

    def _run(self, resume: Callable[[Any], Future[Any]], what: Exception | None) -> None:
        self._awaited = None
        try:
            awaited = resume(what)
        except StopIteration as end:
            self.set(end.value)
        except Exception as e:
            if not isinstance(e, Unavailable):
                logger.exception("fault in %s", self._coroutine)
            self.fail(e)
        else:
            self._awaited = awaited
            awaited._waiting.append(self)
