"""Which way a record takes from the worker that has it to the combine node."""

from __future__ import annotations

from enum import Enum

from .description import Description


class Way(Enum):
    """A value of ``--through`` is the way that is tried first."""

    DIRECT = "direct"
    """From worker to combine node."""
    TIERS = "tiers"
    """The worker leaves it in a tier that both share, and the combine node reads it there."""


def common_tier(worker: Description, combine: Description) -> str | None:
    """The identity of the tier that both share: the combine node's fastest."""
    return next((tier for tier in combine.shared_tiers if tier in worker.shared_tiers), None)
