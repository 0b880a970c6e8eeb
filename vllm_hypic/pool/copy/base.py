"""The interface that moves records from the pool to host memory and back, with two implementations.
``host.py`` copies at once, on the CPU; ``staged.py`` copies on a stream beside a device's passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from ...store.record import RecordHeader
from ..plans import RecordPlace

Sections = Mapping[str, np.ndarray]
"""A record's sections by name, each flat, uint8; valid only during the call that receives them."""
Intake = Callable[[Sections], None]
"""Takes a checked record, on any thread, into the pool or to where ``RecordMover.settle`` finds it."""
Finish = Callable[[memoryview], None]
"""Seals a record's bytes once all are copied."""
Then = Callable[[str], None]
"""Receives an empty text once a record is complete as bytes, or the reason why it never will be."""
LEFT_THE_POOL = "the record has left the pool"


class RecordMover(Protocol):
    """Moves the records of one worker.  Only its thread calls this, except the result of :meth:`intake`."""

    @property
    def unfinished(self) -> int:
        """Number of records whose copies are under way: steps must go on until it is 0."""

    def write(
        self,
        place: RecordPlace,
        header: RecordHeader,
        buffer: memoryview,
        then: Then,
        finish: Finish | None = None,
    ) -> None:
        """Fill ``buffer`` (of ``record_nbytes(header)`` bytes) with the complete record in ``place``.

        ``finish`` seals the buffer, perhaps on another thread; without ``finish`` the buffer stays unsealed.
        The mover then calls ``then("")``, or ``then(reason)`` if the record left the pool before or a copy of
        its bytes failed.  This call happens once, now or later, on the caller's thread.  The record may be
        dropped meanwhile.
        """

    def intake(self, place: RecordPlace) -> Intake:
        """Return a function that takes a record for ``place``, which is reserved and was offered blocks."""

    def settle(self, place: RecordPlace, then: Callable[[int], None]) -> None:
        """Bring the record that the intake of ``place`` has taken into the pool.

        The mover calls ``then(blocks)`` once, now or later, when passes launched afterwards find the record.
        ``blocks`` is the number of transition blocks that the record keeps."""

    def discard(self, place: RecordPlace) -> None:
        """Note that no record comes to ``place``, and drop the record that its intake took, if any.

        Do not call this after :meth:`settle`."""

    def dropped(self, slots: Iterable[int]) -> None:
        """Note that the records in ``slots`` are gone: new passes and records may use the slots at once."""

    def advance(self) -> None:
        """Continue copies, and report finished copies to their callers.  Call this once a step."""

    def drain(self) -> None:
        """Wait until no copy is under way."""

    def close(self) -> None:
        """Drain.  Callers must not use the mover afterwards."""
