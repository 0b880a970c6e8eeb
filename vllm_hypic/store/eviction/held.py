"""The held objects of a policy as packed arrays: scores of all of them in a few numpy calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..worth import Worth

Floats = NDArray[np.float64]
Column = Literal["used", "density", "flops"]
FIRST_CHUNK = 32
"""Objects sorted at first in :meth:`HeldTable.ascending`: usually more than one put evicts."""


class HeldTable:
    """Rows ``0 .. len - 1``, one an object, in no order: a removed row is filled by the last one."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._row: dict[str, int] = {}
        self._columns: dict[Column, Floats] = {
            "used": np.empty(64),
            "density": np.empty(64),
            "flops": np.empty(64),
        }
        self._changes = 0

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._row

    def row(self, key: str) -> int | None:
        return self._row.get(key)

    def column(self, name: Column) -> Floats:
        """``used`` (time of last use), ``density`` (FLOPs per byte) or ``flops``; valid until a change."""
        return self._columns[name][: len(self.keys)]

    def put(self, key: str, used: float, worth: Worth) -> None:
        """Add the object, or change it."""
        self._changes += 1
        row = self._row.get(key)
        if row is None:
            row = self._row[key] = len(self.keys)
            self.keys.append(key)
            if row == len(self._columns["used"]):
                for name, old in self._columns.items():
                    self._columns[name] = np.concatenate([old, np.empty_like(old)])
        self._columns["used"][row] = used
        self.resize(key, worth)

    def resize(self, key: str, worth: Worth) -> None:
        """Another worth for an object; unknown keys are ignored."""
        row = self._row.get(key)
        if row is not None:
            self._changes += 1
            self._columns["density"][row] = worth.flops_per_byte
            self._columns["flops"][row] = worth.flops

    def touch(self, key: str, used: float) -> bool:
        """Set the time of last use; False for an unknown key."""
        row = self._row.get(key)
        if row is None:
            return False
        self._changes += 1
        self._columns["used"][row] = used
        return True

    def drop(self, key: str) -> bool:
        """Remove the object; False for an unknown key."""
        row = self._row.pop(key, None)
        if row is None:
            return False
        self._changes += 1
        last = self.keys.pop()
        if last != key:
            self.keys[row] = last
            self._row[last] = row
            for values in self._columns.values():
                values[row] = values[len(self.keys)]
        return True

    def ascending(self, scores: Floats) -> Iterator[str]:
        """Keys by score, equal ones by time of last use.  Sorts as far as the walk goes, in growing chunks.

        ``RuntimeError`` when the table is changed before the walk ends.
        """
        changes, done, chunk = self._changes, 0, FIRST_CHUNK
        used = self.column("used").copy()
        while done < len(scores):
            upto = min(len(scores), done + chunk)
            if upto < len(scores):
                # All that are tied with the last one: their order is settled by time of last use.
                limit = np.partition(scores, upto - 1)[upto - 1]
                rows = np.flatnonzero(scores <= limit)
            else:
                rows = np.arange(len(scores))
            order = rows[np.lexsort((used[rows], scores[rows]))]
            for row in order[done:]:
                if self._changes != changes:
                    raise RuntimeError("the policy was changed while its worst objects were walked")
                yield self.keys[row]
            done, chunk = len(order), chunk * 8
