"""Disk tiers of the tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.tiers.disk import DiskTier

from .tier_contract import name

HEAD_BYTES = 64
OpenTier = Callable[..., DiskTier]


@contextmanager
def tiers_in(folder: Path, clock: Callable[[], float]) -> Iterator[OpenTier]:
    """Opens tiers in one folder: for the operating system each is another process.

    All are closed in the end; the books of one that is alone are held against its files.
    """
    tiers: list[DiskTier] = []

    def open_tier(budget: int = 1000, *, durable: bool = False, shared: bool = False) -> DiskTier:
        tier = DiskTier("disk", folder, budget, LruPolicy(), clock=clock, durable=durable, shared=shared)
        tier.open()
        tiers.append(tier)
        return tier

    yield open_tier
    left = [tier for tier in tiers if tier._open]
    for tier in left:
        if len(left) == 1:
            tier.check_integrity()
        tier.close()


def place(path: Path, i: int) -> Path:
    """The i-th object's file."""
    return path / name(i)[0] / name(i)[1] / f"{name(i)}.hypic"
