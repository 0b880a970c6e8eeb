"""Read a record from the store, where other objects may hold the K and V of its first columns.

object of the record -> object of its base, for the columns it lacks -> the base's base -> ... -> taken

The store keeps shared columns once: a conversation's next turn stores its own columns, a checkpoint none.
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
"""Most bases, one behind the other, that a record may have."""


class IncomingRecord:
    """Reads one object after the other, checks each as a whole, and takes the record once it is complete.

    ``expected``: the record, which may have a base; ``attention``: names of its sections with a row for each
    column; ``is_sound`` checks the other sections; ``take`` receives the complete record; ``there``: number
    of its first columns that the pool has already.
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
        """K and V by object, the last columns first."""
        self.read_keys: list[SegmentKey] = []
        """Keys of the objects that were read."""
        self.next: SegmentKey | None = SegmentKey(expected.key)
        """Key of the next object to read; ``None`` once the record is taken."""

    @property
    def most_nbytes(self) -> int:
        """Most bytes that the next object may have."""
        return self._expected.max_nbytes

    @property
    def goes_on(self) -> bool:
        """Whether a next object exists, was not read before, and does not exceed :data:`MOST_BASES`."""
        new = self.next is not None and self.next not in self.read_keys
        return new and len(self.read_keys) <= MOST_BASES

    def read(self, data: memoryview) -> Verdict:
        """Read the next object, see :class:`~..store.protocol.Reader`.  An unsound object changes nothing."""
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
