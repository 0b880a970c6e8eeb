"""Disk tiers of the tests."""

from pathlib import Path

from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.tiers.disk import DiskTier

from .tier_contract import name

HEAD_BYTES = 64


def opened(path: Path, budget: int, clock, *, durable: bool = False, shared: bool = False) -> DiskTier:
    tier = DiskTier("disk", path, budget, LruPolicy(), clock=clock, durable=durable, shared=shared)
    tier.open()
    return tier


def place(path: Path, i: int) -> Path:
    """The i-th object's file."""
    return path / name(i)[0] / name(i)[1] / f"{name(i)}.hypic"
