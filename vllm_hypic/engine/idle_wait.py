"""Pauses an engine that only waits for records, from other instances or from the store.

vLLM steps such an engine without end: a step takes 1 to 2 ms, and its statistics as much again in the API
server.  Without pauses, the steps would take the core from local instances that compute the records, and the
interpreter's lock from the store's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

_SHARE, _SHORTEST_S = 0.02, 0.001
_LONGEST_S = 0.02
"""Longest pause that no event ends; shorter pauses last the share ``_SHARE`` of the time waited so far."""
_LONGEST_WOKEN_S = 0.25
"""Longest pause that every event ends; the pause is bounded because steps also check deadlines."""

Watch = Callable[[Callable[[], None]], bool]
"""Registers a callback, called for each record that arrives or fails; returns False if not possible."""


def watch_arrivals(wake: Callable[[], None]) -> bool:
    """Register ``wake`` at this process's worker, as a :data:`Watch`.
    Returns False if the worker is another process, or receives no records from other instances."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from ..connector.multi_connector import own_connector

    connector = own_connector(get_kv_transfer_group() if has_kv_transfer_group() else None)
    if connector is None or connector.worker is None:
        return False
    return connector.worker.watch_arrivals(wake)


class IdleWait:
    """Pauses the engine's thread; any thread may call :meth:`wake`."""

    def __init__(self, inbox: Queue[Any] | None = None, watch: Watch = lambda wake: False) -> None:
        """``inbox``: queue in which the engine's requests arrive; each arrival ends a pause."""
        self._inbox = inbox
        self._watch = watch
        self._watched: bool | None = None
        """Whether arriving records end pauses; ``None`` until the first pause asks ``watch``."""
        self._rung = False
        self._since: float | None = None

    def wait(self, *, until_woken: bool) -> None:
        """Pause.  ``until_woken``: whether only an arriving request or record needs the next step."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        short = min(_LONGEST_S, max(_SHORTEST_S, _SHARE * (now - self._since)))
        if self._inbox is None:
            time.sleep(short)
            return
        if self._watched is None:
            self._watched = self._watch(self.wake)
        # The queue notifies this condition for every item; consumers check for items after each wake-up.
        with self._inbox.not_empty:
            self._inbox.not_empty.wait_for(
                lambda: self._rung or self._inbox_filled(),
                _LONGEST_WOKEN_S if until_woken and self._watched else short,
            )
            self._rung = False

    def reset(self) -> None:
        """Restart the waiting time, because a step ran or the engine waits for no record."""
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
