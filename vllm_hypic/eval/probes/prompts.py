"""Prompts that probes look at: a demo model's own questions, random documents for any other model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...harness.generators import FIRST_SEED, Generator, find_generator
from ...harness.prompts import HEAD, QUESTION, Prompt, Writer


def make_prompts(
    model: Path, vocabulary: Sequence[int], count: int, segments: int, tokens: int, seed: int
) -> list[Prompt]:
    """``count`` prompts over ``segments`` documents of ``tokens`` tokens; the same seed, the same prompts."""
    if (generator := find_generator(model)) is not None:
        return [_question(generator, seed + i, segments, tokens) for i in range(count)]
    writer = Writer(vocabulary, seed)
    return [writer.prompt(segments, tokens, head=HEAD, question=QUESTION) for _ in range(count)]


def _question(generator: Generator, seed: int, segments: int, tokens: int) -> Prompt:
    kinds = generator.LEARNED if segments > 1 else generator.LEARNED[:1]
    kind = kinds[seed % len(kinds)]
    parts = generator.prompt(FIRST_SEED + seed, segments, tokens, kind, facts=generator.FACTS)
    return Prompt(tuple(parts["system"]), tuple(map(tuple, parts["docs"])), tuple(parts["question"]))
