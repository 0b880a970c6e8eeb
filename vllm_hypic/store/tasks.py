"""Coroutines without an event loop: whoever brings what one waits for runs it on, at once and on its thread.

So a fetch or a write reads from top to bottom, and no thread stands between a tier's thread and a reader.
Nothing here locks: all calls are made with the one lock held that guards what the coroutines touch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

logger = logging.getLogger("vllm.hypic.store")

T = TypeVar("T")


class Unavailable(Exception):
    """What a task waits for will not come.  Its text says why."""


class Future(Generic[T]):
    """A value, or an error, that is there or will come; the first one counts.  Any number of tasks wait."""

    __slots__ = ("_error", "_value", "_waiting", "done")
    _value: T

    def __init__(self) -> None:
        self.done = False
        self._error: Exception | None = None
        self._waiting: list[Task[Any]] = []

    def set(self, value: T) -> None:
        """End with a value: the tasks that wait run on before this returns."""
        if not self.done:
            self._value = value
            self._end()

    def fail(self, error: Exception) -> None:
        """End with an error, which is raised in the tasks that wait."""
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
            del self  # or the error and its traceback would keep each other, and the object with them


class Task(Future[T]):
    """Runs a coroutine until it waits; then whoever ends what it waits for does.

    An :class:`Unavailable` that the coroutine raises is the task's; anything else is a fault of ours: it is
    logged, and ends nothing but the task.
    """

    __slots__ = ("_awaited", "_coroutine")

    def __init__(self, coroutine: Coroutine[Future[Any], None, T]) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._awaited: Future[Any] | None = None
        self._run(coroutine.send, None)

    def run_on(self, awaited: Future[Any]) -> None:
        """Go on if the task still waits for ``awaited``, which has ended."""
        if self._awaited is awaited:
            self._run(self._coroutine.send, None)

    def interrupt(self, error: Exception) -> None:
        """Raise ``error`` where the task waits.  No effect on one that has ended."""
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
