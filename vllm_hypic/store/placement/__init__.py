"""Where a record keeps recurrent states: rules by name (here), the optimal one, what is learned of depths."""

from __future__ import annotations

from typing import Literal, get_args

from .base import Placer
from .optimal import OptimalPlacer
from .spacings import EQUAL, LAST, POWERS, SQRT

PlacerName = Literal["optimal", "equal", "last", "powers", "sqrt"]
_PLACERS: dict[str, Placer] = {
    "optimal": OptimalPlacer(),
    "equal": EQUAL,
    "last": LAST,
    "powers": POWERS,
    "sqrt": SQRT,
}


def make_placer(name: PlacerName) -> Placer:
    """The rule of that name; ``ValueError`` for names that are not allowed."""
    if name not in _PLACERS:
        raise ValueError(f"placement={name!r}: expected {' or '.join(get_args(PlacerName))}")
    return _PLACERS[name]
