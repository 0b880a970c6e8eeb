"""Recency and cache value in one score, after Marconi (arXiv 2411.19379), with an alpha tuned by replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..cache_value import CacheValue
from .ghost_list import GhostList
from .ranking import Ranking, grade
from .replay import Setting
from .tuner import Tuner, TunerMode

Admission = Literal["cache-value", "always"]
LEAST_GHOSTS = 4096
GHOSTS_PER_HELD = 8


class FlopAwarePolicy:
    """Evicts by :mod:`.ranking`'s score; lets in what is expected to save more than what it drives out.

    What an object is expected to save is its FLOPs over the time since it was last asked for; a newcomer's
    last asking is the one before the miss that brings it.  ``admission`` "always" lets everything in.
    ``setting``: a fixed one, instead of one that is tuned.

    Time is the number of accesses and additions so far: no two uses are at the same time.
    """

    def __init__(
        self,
        admission: Admission = "cache-value",
        tuner: TunerMode = "background",
        setting: Setting | None = None,
    ) -> None:
        self.tuner = Tuner(tuner, choosy=admission == "cache-value") if setting is None else None
        self._fixed = setting
        self._ranking = Ranking()
        self._values: dict[str, CacheValue] = {}
        self._bytes = 0
        self._most_bytes = 0
        self._ghosts = GhostList()
        self._now = 0

    @property
    def setting(self) -> Setting:
        """The setting in force."""
        if self._fixed is not None:
            return self._fixed
        assert self.tuner is not None
        return self.tuner.setting

    @property
    def tunings(self) -> int:
        """Number of settings found so far."""
        return self.tuner.tunings if self.tuner is not None else 0

    def added(self, key: str, value: CacheValue) -> None:
        self._ghosts.forget(key)
        if key in self._values:
            self._weigh(key, value)
            self.hit(key)
            return
        # For the tuner the miss was the access; what comes without one was left by a former process.
        self._now += 1
        self._ranking.put(key, grade(value), self._now)
        self._weigh(key, value)

    def resized(self, key: str, value: CacheValue) -> None:
        if key in self._values:
            self._weigh(key, value)
            self._ranking.regrade(key, grade(value))

    def hit(self, key: str) -> None:
        value = self._values.get(key)
        if value is not None:
            self._ranking.touch(key, self._access(key, value, hit=True))

    def removed(self, key: str, *, evicted: bool) -> None:
        value = self._values.pop(key, None)
        if value is None:
            return
        self._bytes -= value.nbytes
        if evicted:
            self._ghosts.evicted(key, self._ranking.used(key), self._ghosts_limit())
            if self.tuner is not None:
                self.tuner.evicted()
        self._ranking.drop(key)

    def missed(self, key: str, value: CacheValue) -> None:
        now = self._access(key, value, hit=False)
        self._ghosts.missed(key, now, self._ghosts_limit())

    def worst_first(self) -> Iterator[str]:
        return self._ranking.worst_first(self._now, self.setting.alpha)

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        patience = self.setting.patience
        seen = self._ghosts.get(key)
        # Without a miss on record nothing is known of the newcomer: its owner does not report misses.
        if not victims or not patience or seen is None:
            return True
        last = seen.before if seen.open else seen.latest
        age = patience if last is None else self._age(last)
        lost = sum(self._values[v].flops / self._age(self._ranking.used(v)) for v in victims)
        return value.flops >= lost * age

    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()

    def _access(self, key: str, value: CacheValue, *, hit: bool) -> int:
        """Count one more access; returns its time."""
        self._now += 1
        if self.tuner is not None:
            self.tuner.accessed(key, value, self._most_bytes, hit=hit)
        return self._now

    def _age(self, time: int) -> int:
        return max(1, self._now - time)

    def _weigh(self, key: str, value: CacheValue) -> None:
        old = self._values.get(key)
        self._values[key] = value
        self._bytes += value.nbytes - (old.nbytes if old else 0)
        self._most_bytes = max(self._most_bytes, self._bytes)

    def _ghosts_limit(self) -> int:
        return max(LEAST_GHOSTS, GHOSTS_PER_HELD * len(self._values))
