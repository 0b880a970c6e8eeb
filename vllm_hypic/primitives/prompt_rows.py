"""Map the tokens of a request's stream to the prompt that the client sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .plan import PromptPlan
from .tokens import Marker, PrimitiveIds


@dataclass(frozen=True)
class PromptRows:
    """A prompt as the client sent it, with primitives, and the stream rows with its tokens' likelihoods.

    Stream row ``rows[i]`` belongs to the token right before ``tokens[targets[i]]``.  A token that is no
    target has no such row: the token before it comes from a record, is padding, or does not exist.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    targets: tuple[int, ...]


def prompt_rows(ids: Sequence[int], plan: PromptPlan, primitives: PrimitiveIds) -> PromptRows:
    """Return the rows of ``plan``, the plan of the prompt ``ids``."""
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
