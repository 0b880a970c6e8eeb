"""Which way a record takes from the worker that has it to the combine node."""

from __future__ import annotations

from enum import Enum


class Way(Enum):
    """A value of ``--through`` is the way that is tried first."""

    DIRECT = "direct"
    """From worker to combine node."""
    TIERS = "tiers"
    """The worker leaves it in a tier that both share, and the combine node reads it there."""
