"""Recency and worth in one score, after Marconi (arXiv 2411.19379), with an alpha tuned by replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..worth import Worth
from .ranking import Ranking, grade
from .replay import Setting
from .sightings import Sightings
from .tuner import Tuner, TunerMode

Admission = Literal["worth", "always"]
LEAST_SIGHTINGS = 4096
SIGHTINGS_PER_HELD = 8


class FlopAwarePolicy:
    """Evicts by :mod:`.ranking`'s score; lets in what is expected to save more than what it drives out.

    What an object is expected to save is its FLOPs over the time since it was last asked for; a newcomer's
    last asking is the one before the miss that brings it.  ``admission`` "always" lets everything in.
    ``setting``: a fixed one, instead of one that is tuned.

    Time is the number of accesses and additions so far: no two uses are at the same time.
    """

    def __init__(
        self,
        admission: Admission = "worth",
        tuner: TunerMode = "background",
        setting: Setting | None = None,
    ) -> None:
        self.tuner = Tuner(tuner, choosy=admission == "worth") if setting is None else None
        self._fixed = setting
        self._ranking = Ranking()
        self._worths: dict[str, Worth] = {}
        self._bytes = 0
        self._most_bytes = 0
        self._sightings = Sightings()
        self._now = 0

    @property
    def setting(self) -> Setting:
        """What is in force."""
        if self._fixed is not None:
            return self._fixed
        assert self.tuner is not None
        return self.tuner.setting

    @property
    def tunings(self) -> int:
        """Settings found so far."""
        return self.tuner.tunings if self.tuner is not None else 0

    def added(self, key: str, worth: Worth) -> None:
        self._sightings.forget(key)
        if key in self._worths:
            self._weigh(key, worth)
            self.hit(key)
            return
        # For the tuner the miss was the access; what comes without one was left by a former process.
        self._now += 1
        self._ranking.put(key, grade(worth), self._now)
        self._weigh(key, worth)

    def resized(self, key: str, worth: Worth) -> None:
        if key in self._worths:
            self._weigh(key, worth)
            self._ranking.regrade(key, grade(worth))

    def hit(self, key: str) -> None:
        worth = self._worths.get(key)
        if worth is not None:
            self._ranking.touch(key, self._access(key, worth, hit=True))

    def removed(self, key: str, *, evicted: bool) -> None:
        worth = self._worths.pop(key, None)
        if worth is None:
            return
        self._bytes -= worth.nbytes
        if evicted:
            self._sightings.evicted(key, self._ranking.used(key), self._sightings_limit())
            if self.tuner is not None:
                self.tuner.evicted()
        self._ranking.drop(key)

    def missed(self, key: str, worth: Worth) -> None:
        now = self._access(key, worth, hit=False)
        self._sightings.missed(key, now, self._sightings_limit())

    def worst_first(self) -> Iterator[str]:
        return self._ranking.worst_first(self._now, self.setting.alpha)

    def admits(self, key: str, worth: Worth, victims: list[str]) -> bool:
        patience = self.setting.patience
        seen = self._sightings.get(key)
        # Without a miss on record nothing is known of the newcomer: its owner does not report misses.
        if not victims or not patience or seen is None:
            return True
        last = seen.before if seen.open else seen.latest
        age = patience if last is None else self._age(last)
        lost = sum(self._worths[v].flops / self._age(self._ranking.used(v)) for v in victims)
        return worth.flops >= lost * age

    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()

    def _access(self, key: str, worth: Worth, *, hit: bool) -> int:
        """One more access; its time."""
        self._now += 1
        if self.tuner is not None:
            self.tuner.accessed(key, worth, self._most_bytes, hit=hit)
        return self._now

    def _age(self, time: int) -> int:
        return max(1, self._now - time)

    def _weigh(self, key: str, worth: Worth) -> None:
        old = self._worths.get(key)
        self._worths[key] = worth
        self._bytes += worth.nbytes - (old.nbytes if old else 0)
        self._most_bytes = max(self._most_bytes, self._bytes)

    def _sightings_limit(self) -> int:
        return max(LEAST_SIGHTINGS, SIGHTINGS_PER_HELD * len(self._worths))
