"""The cheapest link method that is a go: what the gate tries, and what a server takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config.engine import HypicConfig

LADDER = (
    ("none", "none"),
    ("text", "none"),
    ("text", "query-5"),
    ("text", "query-10"),
    ("text", "query-20"),
    ("text", "query-30"),
)
"""Contexts and islands by what a warm prompt computes, least first; a context costs nothing when warm."""


def candidates(config: HypicConfig) -> Iterator[HypicConfig]:
    """``config`` with each context and islands of the ladder."""
    for context, islands in LADDER:
        yield replace(config, context=context, islands=islands)
