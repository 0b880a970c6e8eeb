"""Candidates for the cheapest link method that is a go: the gate tries, and servers choose, among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config.engine import DENSE_CONTEXT, DENSE_ISLANDS, HypicConfig

LADDER = (
    ("none", "none"),
    ("text", "none"),
    ("text", "query-5"),
    ("text", "query-10"),
    (DENSE_CONTEXT, DENSE_ISLANDS),
    ("text", "query-20"),
    ("text", "query-30"),
)
"""Contexts and islands, the default of dense models included.  The order is by the tokens that a warm prompt
of thousands of tokens computes, fewest first.  A context costs a warm prompt nothing."""


def candidates(config: HypicConfig) -> Iterator[HypicConfig]:
    """Yield ``config`` with each pair of context and islands in the ladder."""
    for context, islands in LADDER:
        yield replace(config, context=context, islands=islands)
