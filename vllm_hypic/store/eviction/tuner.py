"""When to tune, on which accesses, and where: on a thread of its own, or inline for tests and the simulator.

Until the first eviction nothing needs to be chosen.  If that comes after ``n`` accesses, the setting is
tuned after ``5 n`` more, then after twice as many each time, on a window that grows to ``15 n``, and at last
once per window.  In between it is tuned again on drift: when the share of FLOPs saved in the last quarter of
a window is less than 0.9 of what tuning predicted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal

from ..cache_value import CacheValue
from .replay import Access, Interrupted, Setting, Window
from .search import Tuned, best_setting

TunerMode = Literal["background", "inline"]

FIRST_FACTOR, WINDOW_FACTOR = 5, 15
LEAST_WAIT, LEAST_WINDOW, GREATEST_WINDOW = 512, 8192, 65_536
"""Accesses: a window of fewer says little, one of more takes seconds to replay."""
DRIFT = 0.9
BLOCKS = 4


class Tuner:
    """Remembers accesses and keeps ``setting`` good.  Its owner locks; ``setting`` may be read by anyone."""

    def __init__(self, mode: TunerMode, *, choosy: bool) -> None:
        self.setting = Setting()
        self.tunings = 0
        self.seconds = 0.0
        """Time of the last tuning."""
        self._mode, self._choosy = mode, choosy
        self._recent: deque[Access] = deque(maxlen=GREATEST_WINDOW)
        self._seen = 0
        self._length = 0  # of the window; 0 until the first eviction
        self._wait = 0  # accesses from one tuning to the next
        self._due = 0
        self._block_asked = self._block_saved = 0.0
        self._tuned: Tuned | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def accessed(self, key: str, value: CacheValue, budget: int, *, hit: bool) -> None:
        """An object was asked for, of a cache that holds ``budget`` bytes.  May start a tuning."""
        self._seen += 1
        self._recent.append((key, value))
        if not self._length:
            return
        self._block_asked += value.flops
        self._block_saved += value.flops if hit else 0.0
        if self._seen % (self._length // BLOCKS) == 0:
            if self._drifted():
                self._due = min(self._due, self._seen)
            self._block_asked = self._block_saved = 0.0
        if self._seen >= self._due and not self._stop.is_set():
            self._start(budget)

    def evicted(self) -> None:
        """An object had to leave for want of room."""
        if not self._length:
            self._length = min(GREATEST_WINDOW, max(LEAST_WINDOW, WINDOW_FACTOR * self._seen))
            self._wait = min(self._length, max(LEAST_WAIT, FIRST_FACTOR * self._seen))
            self._due = self._seen + self._wait

    def close(self) -> None:
        """Stop a tuning that runs, and begin no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _drifted(self) -> bool:
        tuned = self._tuned
        return tuned is not None and self._block_saved < DRIFT * tuned.share * self._block_asked

    def _start(self, budget: int) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        accesses = list(islice(self._recent, max(0, len(self._recent) - self._length), None))
        if self._tuned is not None:
            self._wait = min(self._length, 2 * self._wait)
        self._due = self._seen + self._wait
        if self._mode == "inline":
            self._tune(accesses, budget, None)
            return
        self._thread = threading.Thread(
            target=self._tune, args=(accesses, budget, self._stop.is_set), name="hypic-eviction", daemon=True
        )
        self._thread.start()

    def _tune(self, accesses: list[Access], budget: int, stopped: Callable[[], bool] | None) -> None:
        begin = time.perf_counter()
        try:
            tuned = best_setting(Window.of(accesses), budget, choosy=self._choosy, stopped=stopped)
        except Interrupted:
            return
        # One assignment each: readers see the old or the new setting, whole.
        self._tuned, self.setting = tuned, tuned.setting
        self.seconds = time.perf_counter() - begin
        self.tunings += 1
