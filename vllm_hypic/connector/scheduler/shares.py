"""What the records of each tenant take that requests use, or that are being made."""

from __future__ import annotations

from collections.abc import Iterable

from ...pool.plans import Space
from .entries import Entry


class TenantShares:
    """What each tenant's held records take together; a checkpoint counts as a part of the record that it was
    made of, and of one that grows its own pages alone count."""

    def __init__(self) -> None:
        self._held: dict[str, Space] = {}
        """What is held, by tenant; a tenant that holds nothing is not in it."""

    def of(self, tenant: str) -> Space:
        return self._held.get(tenant, Space())

    def add(self, entry: Entry) -> None:
        """It is held from now on."""
        if not entry.is_checkpoint:
            self._held[entry.tenant] = self.of(entry.tenant) + entry.charged

    def remove(self, entry: Entry) -> None:
        """It is held no longer."""
        if entry.is_checkpoint:
            return
        left = self._held.pop(entry.tenant) - entry.charged
        if left.slots:  # every record has one
            self._held[entry.tenant] = left

    def lessen(self, entry: Entry, space: Space) -> None:
        """It is held, and takes so much less from now on."""
        self._held[entry.tenant] -= space

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise ``RuntimeError`` unless the counts are those of all ``entries``."""
        held: dict[str, Space] = {}
        for entry in entries:
            if entry.counted:
                held[entry.tenant] = held.get(entry.tenant, Space()) + entry.charged
        if held != self._held:
            raise RuntimeError("public pool: a tenant's share is miscounted")
