"""Policies by name."""

from __future__ import annotations

from typing import Literal, get_args

from .base import EvictionPolicy

PolicyName = Literal["lru", "flop-aware"]
Admission = Literal["worth", "always"]


def make_policy(name: PolicyName, admission: Admission = "worth") -> EvictionPolicy:
    """A new policy, for one tier.  ``ValueError`` for names that are not allowed."""
    if admission not in get_args(Admission):
        raise ValueError(f"admission={admission!r}: expected {' or '.join(get_args(Admission))}")
    if name == "lru":
        from .lru import LruPolicy

        return LruPolicy()
    if name == "flop-aware":
        from .flop_aware import FlopAwarePolicy

        return FlopAwarePolicy()
    raise ValueError(f"eviction={name!r}: expected {' or '.join(get_args(PolicyName))}")
