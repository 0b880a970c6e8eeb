"""How records get from the pool to host memory and back.  One seam, two ways: on the CPU at once
(``host.py``), on a device that runs behind by copies on a stream of their own (``staged.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from ...store.record import RecordHeader
from ..plans import RecordPlace

Sections = Mapping[str, np.ndarray]
"""A record's sections by name, each flat, uint8; valid during the call that they are given to."""
Intake = Callable[[Sections], None]
"""Takes a checked record over, on any thread: into the pool, or to where ``RecordMover.settle`` finds it."""
Finish = Callable[[memoryview], None]
"""Finishes a record's bytes once they are all there."""
Then = Callable[[str], None]
"""Is told that a record is complete as bytes: by an empty text, else by why it will not be."""
LEFT_THE_POOL = "the record has left the pool"


class RecordMover(Protocol):
    """Moves the records of one worker.  Called by its thread only, but for what :meth:`intake` returns."""

    @property
    def unfinished(self) -> int:
        """Records whose copies are under way: steps must go on until there are none."""

    def write(
        self,
        place: RecordPlace,
        header: RecordHeader,
        buffer: memoryview,
        then: Then,
        finish: Finish | None = None,
    ) -> None:
        """Fill ``buffer`` (of ``record_nbytes(header)`` bytes) with the complete record in ``place``, and
        have ``finish`` seal it, perhaps on another thread; without it the buffer is not sealed.

        ``then("")`` once that is done; its argument is why not if the record left the pool before, or its
        bytes could not be copied: during this call or a later one, once, on the caller's thread.  The record
        may be dropped meanwhile.
        """

    def intake(self, place: RecordPlace) -> Intake:
        """A function that takes one record, which is to come to ``place``, which is reserved and was offered
        transition blocks."""

    def settle(self, place: RecordPlace, then: Callable[[int], None]) -> None:
        """The intake of ``place`` has taken a record: ``then(blocks)`` once passes launched from then on
        find it in the pool, with the blocks that it keeps.  During this call or a later one, once."""

    def discard(self, place: RecordPlace) -> None:
        """Nothing comes to ``place`` any more, and what its intake took is not wanted.  Not after
        :meth:`settle`."""

    def dropped(self, slots: Iterable[int]) -> None:
        """The records in ``slots`` are gone: passes and records of others may follow at once."""

    def advance(self) -> None:
        """Go on with copies, and say what was done.  Once a step."""

    def drain(self) -> None:
        """Wait until no copy is under way."""

    def close(self) -> None:
        """Drain; nothing is asked for any more."""
