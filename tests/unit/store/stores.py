"""Stores over awkward tiers, and what tests do with them."""

from collections.abc import Callable
from typing import Any

from vllm_hypic.store.protocol import CacheValue, Fetched, Verdict
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore

from .awkward_tiers import PATIENCE_S, AwkwardTier, Hang, name, wait_for

DEADLINE_S = StoreSettings().deadline_s
SIZE = 100


def content(i: int) -> bytes:
    return bytes([i % 256]) * SIZE


class Reading:
    """A reader that takes what is the i-th object, and remembers what it was given."""

    def __init__(self, i: int) -> None:
        self.seen: list[bytes] = []
        self._sound = content(i)

    def __call__(self, data: memoryview) -> Verdict:
        self.seen.append(bytes(data))
        return Verdict.TAKEN if self.seen[-1] == self._sound else Verdict.DAMAGED


Opener = Callable[..., TieredStore]
One = tuple[TieredStore, AwkwardTier]
Two = tuple[TieredStore, AwkwardTier, AwkwardTier]


def stuck(tier: AwkwardTier, operation: str, call: Callable[[], object]) -> Hang:
    """The operation hangs that ``call`` leads to; others hang, too, until the tier recovers."""
    hang = tier.hang(operation)
    call()
    hang.wait_until_entered()
    return hang


def commit(store: TieredStore, i: int, data: bytes | None = None, **more: Any) -> None:
    """``more``: what ``store.commit`` takes beside the reservation."""
    reservation = store.reserve(name(i), CacheValue(10, 1e9, SIZE))
    assert reservation is not None
    if "finish" not in more:
        reservation.buffer[:] = data or content(i)
    store.commit(reservation, **more)


def filled(store: TieredStore, *objects: int) -> None:
    for i in objects:
        commit(store, i)
    assert store.drain(PATIENCE_S)


def reported(store: TieredStore) -> Fetched:
    reports: list[Fetched] = []
    wait_for(lambda: reports.extend(store.poll()) or reports, "a report")
    assert len(reports) == 1
    return reports[0]


def fetch(store: TieredStore, i: int, reading: Reading | None = None) -> str | None:
    """The tier that had it; ``None`` also when nothing was started."""
    if not store.prefetch(name(i), SIZE, reading or Reading(i)):
        return None
    return reported(store).tier


def place(tier: AwkwardTier, *objects: int, data: bytes | None = None) -> None:
    """Left there by a former process."""
    tier.objects.update((name(i), memoryview(data or content(i))) for i in objects)
