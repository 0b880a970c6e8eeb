"""A record on its way from the store, where the K and V of its first columns may be in others.

object of the record -> that of its base, for the columns it lacks -> that one's base -> ... -> taken

So what records share is stored once: a conversation's next turn has its own columns, a checkpoint none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..primitives.keys import SegmentKey
from ..store.protocol import Verdict
from ..store.record import Expected, Fault, open_record
from .copy.base import Intake

MOST_BASES = 8
"""Objects that a record rests on at most."""


class IncomingRecord:
    """Reads one object after the other, each checked whole, and takes the record when it has all.

    ``expected``: the record, which may have a base; ``attention``: its sections with a row for each column;
    ``is_sound``: of the other sections; ``there``: its first columns that the pool has already.
    """

    def __init__(
        self,
        expected: Expected,
        attention: Sequence[str],
        is_sound: Callable[[dict[str, np.ndarray]], bool],
        take: Intake,
        there: int = 0,
    ) -> None:
        self._take, self._is_sound = take, is_sound
        self._attention = frozenset(attention)
        self._expected, self._there = expected, there
        self._states: dict[str, np.ndarray] | None = None
        self._rows: list[dict[str, np.ndarray]] = []
        """K and V, those of the last columns first."""
        self.read_keys: list[SegmentKey] = []
        """The objects that were read."""
        self.next: SegmentKey | None = SegmentKey(expected.key)
        """The object to be read; ``None``: the record was taken."""

    @property
    def most_nbytes(self) -> int:
        """Bytes of the largest object that can be the next one."""
        return self._expected.max_nbytes

    @property
    def goes_on(self) -> bool:
        """Whether there is an object to be read that was not read before, and not one too many."""
        new = self.next is not None and self.next not in self.read_keys
        return new and len(self.read_keys) <= MOST_BASES

    def read(self, data: memoryview) -> Verdict:
        """See :class:`~..store.protocol.Reader`.  Nothing is taken of an object that is not sound."""
        record = open_record(data, self._expected)
        if isinstance(record, Fault):
            return record.verdict
        header = record.header
        sections = {name: np.frombuffer(view, np.uint8) for name, view in record.sections.items()}
        rows = {name: sections.pop(name) for name in list(sections) if name in self._attention}
        if self._states is None:
            if not header.leading and not self._is_sound(sections):
                return Verdict.DAMAGED
            self._states = sections
        wanted = self._expected.columns
        if header.first < wanted:
            own, first = header.own_columns, max(0, self._there - header.first)
            some = {name: kv.reshape(own, -1)[first : wanted - header.first] for name, kv in rows.items()}
            self._rows.append(some)
        self.read_keys.append(SegmentKey(header.key))
        if not header.base or header.first <= self._there:
            self.next = None
            self._take(self._states | self._joined())
        else:
            self.next = SegmentKey(header.base)
            columns = min(wanted, header.first)
            self._expected = replace(self._expected, key=header.base, columns=columns, or_more=True)
        return Verdict.TAKEN

    def _joined(self) -> dict[str, np.ndarray]:
        if len(self._rows) == 1:
            return {name: kv.reshape(-1) for name, kv in self._rows[0].items()}
        parts = self._rows[::-1]
        return {
            name: np.concatenate([p[name] for p in parts]).reshape(-1) for name in sorted(self._attention)
        }
