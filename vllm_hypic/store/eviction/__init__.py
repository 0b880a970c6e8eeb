"""Eviction: policies by name (here), how they rank objects, FLOPs of a model, tuning, replay."""

from __future__ import annotations

from typing import Literal, get_args

from .base import EvictionPolicy
from .flop_aware import Admission, FlopAwarePolicy
from .lru import LruPolicy
from .replay import Setting
from .tuner import TunerMode

PolicyName = Literal["lru", "flop-aware"]


def make_policy(
    name: PolicyName,
    admission: Admission = "cache-value",
    tuner: TunerMode = "background",
    alpha: float | None = None,
) -> EvictionPolicy:
    """A new policy, for one tier.  ``ValueError`` for names that are not allowed.

    ``lru`` knows no cache values and lets everything in, whatever ``admission`` says.  ``tuner`` "inline"
    tunes on the caller's thread, so that the same calls have the same outcome every time.  ``alpha``: what it
    is for good, instead of being tuned.  Close the policy after use.
    """
    for what, value, allowed in (
        ("eviction", name, get_args(PolicyName)),
        ("admission", admission, get_args(Admission)),
        ("tuner", tuner, get_args(TunerMode)),
    ):
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: expected {' or '.join(allowed)}")
    setting = None if alpha is None else Setting(alpha)
    return LruPolicy() if name == "lru" else FlopAwarePolicy(admission, tuner, setting)
