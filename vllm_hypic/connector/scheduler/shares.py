"""Space of each tenant's held records: records that requests use, or that are being made."""

from __future__ import annotations

from collections.abc import Iterable

from ...pool.plans import Space
from .entries import Entry


class TenantShares:
    """Counts the space of each tenant's held records.  A checkpoint counts as a part of its record, and of a
    growing record only its own pages count."""

    def __init__(self) -> None:
        self._held: dict[str, Space] = {}
        """Held space by tenant, without tenants that hold nothing."""

    def of(self, tenant: str) -> Space:
        return self._held.get(tenant, Space())

    def add(self, entry: Entry) -> None:
        """Add a record that is held from now on."""
        if not entry.is_checkpoint:
            self._held[entry.tenant] = self.of(entry.tenant) + entry.charged

    def remove(self, entry: Entry) -> None:
        """Subtract a record that is no longer held."""
        if entry.is_checkpoint:
            return
        left = self._held.pop(entry.tenant) - entry.charged
        if left.slots:  # every record has a slot
            self._held[entry.tenant] = left

    def lessen(self, entry: Entry, space: Space) -> None:
        """Subtract ``space`` that a held record no longer takes."""
        self._held[entry.tenant] -= space

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise ``RuntimeError`` unless the counts are those of all ``entries``."""
        held: dict[str, Space] = {}
        for entry in entries:
            if entry.counted:
                held[entry.tenant] = held.get(entry.tenant, Space()) + entry.charged
        if held != self._held:
            raise RuntimeError("public pool: a tenant's share is miscounted")
