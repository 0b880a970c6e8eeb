"""Eviction: policies by name (here), how they rank objects, FLOPs of a model."""

from __future__ import annotations

from typing import Literal, get_args

from .base import EvictionPolicy
from .flop_aware import Admission, FlopAwarePolicy
from .lru import LruPolicy

PolicyName = Literal["lru", "flop-aware"]


def make_policy(name: PolicyName, admission: Admission = "cache-value") -> EvictionPolicy:
    """A new policy, for one tier.  ``ValueError`` for names that are not allowed.

    ``lru`` knows no cache values and lets everything in, whatever ``admission`` says.
    """
    for what, value, allowed in (
        ("eviction", name, get_args(PolicyName)),
        ("admission", admission, get_args(Admission)),
    ):
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: expected {' or '.join(allowed)}")
    return LruPolicy() if name == "lru" else FlopAwarePolicy(admission)
