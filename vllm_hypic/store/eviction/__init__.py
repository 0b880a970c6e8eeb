"""Eviction: policies by name (here), their ranking of objects, and the FLOPs of a model's prefill."""

from __future__ import annotations

from typing import Literal, get_args

from .base import EvictionPolicy
from .flop_aware import Admission, FlopAwarePolicy
from .lru import LruPolicy

PolicyName = Literal["lru", "flop-aware"]


def make_policy(name: PolicyName, admission: Admission = "cache-value") -> EvictionPolicy:
    """Return a new policy for one tier.  Raises ``ValueError`` for a name that is not allowed.

    ``lru`` ignores cache values and admits every object, whatever ``admission`` says.
    """
    for what, value, allowed in (
        ("eviction", name, get_args(PolicyName)),
        ("admission", admission, get_args(Admission)),
    ):
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: expected {' or '.join(allowed)}")
    return LruPolicy() if name == "lru" else FlopAwarePolicy(admission)
