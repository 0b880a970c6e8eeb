"""Pauses of an engine that only waits for records, of other instances or from the store.

vLLM steps such an engine again and again: a step takes 1 to 2 ms, and its statistics as much again in the API
server.  Without pauses that would take the core from those who compute the records, on the same machine, and
the interpreter's lock from the store's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

_SHARE, _SHORTEST_S = 0.02, 0.001
_LONGEST_S = 0.02
"""Longest pause that something new may have to wait for; a share of the time waited so far below that."""
_LONGEST_WOKEN_S = 0.25
"""Longest pause that everything new ends: deadlines are only looked at between pauses."""

Watch = Callable[[Callable[[], None]], bool]
"""Has what it is given called for each record that has come, or will not; False: it cannot."""


def watch_arrivals(wake: Callable[[], None]) -> bool:
    """A :data:`Watch`: False when the engine's worker is another process, or takes no records of others."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from ..connector.beside import own_connector

    connector = own_connector(get_kv_transfer_group() if has_kv_transfer_group() else None)
    if connector is None or connector.worker is None:
        return False
    return connector.worker.watch_arrivals(wake)


class IdleWait:
    """Pauses of the engine's thread; :meth:`wake` may be called by any."""

    def __init__(self, inbox: Queue[Any] | None = None, watch: Watch = lambda wake: False) -> None:
        """``inbox``: where the engine's requests come in; each ends a pause."""
        self._inbox = inbox
        self._watch = watch
        self._watched: bool | None = None
        """Whether records wake; asked when it matters first."""
        self._rung = False
        self._since: float | None = None

    def wait(self, *, until_woken: bool) -> None:
        """Pause.  ``until_woken``: only an arriving request or record asks for the next step."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        short = min(_LONGEST_S, max(_SHORTEST_S, _SHARE * (now - self._since)))
        if self._inbox is None:
            time.sleep(short)
            return
        if self._watched is None:
            self._watched = self._watch(self.wake)
        # A queue's condition, told of every item; who takes items from it looks for them when woken.
        with self._inbox.not_empty:
            self._inbox.not_empty.wait_for(
                lambda: self._rung or self._inbox_filled(),
                _LONGEST_WOKEN_S if until_woken and self._watched else short,
            )
            self._rung = False

    def reset(self) -> None:
        """Something runs, or nothing is waited for."""
        self._since = None

    def wake(self) -> None:
        """End a pause, or skip the next one."""
        assert self._inbox is not None
        with self._inbox.not_empty:
            self._rung = True
            self._inbox.not_empty.notify()

    def _inbox_filled(self) -> bool:
        assert self._inbox is not None
        return bool(self._inbox.queue)
