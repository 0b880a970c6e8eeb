"""Where the tokens of a private stream stand in the prompt that was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .plan import PromptPlan
from .tokens import Marker, PrimitiveIds


@dataclass(frozen=True)
class PromptRows:
    """A prompt as it was sent, primitives included, and the stream rows that say how likely its tokens are.

    Stream row ``rows[i]`` was computed for the token right before ``tokens[targets[i]]``.  Tokens that are no
    target have no such row: the one before them was read from a record, or is padding, or nothing.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    targets: tuple[int, ...]


def prompt_rows(ids: Sequence[int], plan: PromptPlan, primitives: PrimitiveIds) -> PromptRows:
    """The rows of ``plan``, which was made of ``ids``."""
    sent: dict[int, int] = {}
    position = 0
    for index, token in enumerate(ids):
        marker = primitives.marker(token)
        if marker is None:
            sent[position] = index
        if marker in (None, Marker.PAD):
            position += 1
    rows = [row for row, (one, other) in enumerate(pairwise(plan.positions)) if other == one + 1]
    return PromptRows(tuple(ids), tuple(rows), tuple(sent[plan.positions[row + 1]] for row in rows))
