"""vLLM's KV cache in FP8: what stock keeps is as in stock, records have the model's dtype."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from oracle import random_segments

from .conftest import EXAMPLES, EngineFactory
from .engines import SEP, Ask, distance, prompt, same
from .test_exactness import DEMO_SEP

STOP = {"ignore_eos": False}  # what follows an answer was never trained
ROUNDING = 0.25
"""Twice the largest distance seen of an answer with FP8 from the same answer with bfloat16."""

LEAD, A, B, C, QUERY = random_segments([40, 96, 330, 70, 18], vocab=480, seed=21)
ASKS = (
    Ask(prompt(A, B, C, lead=LEAD, query=QUERY), max_tokens=12),
    Ask(prompt(C, A, B, lead=LEAD, query=QUERY), max_tokens=12, extra={"hypic_link": "seam-24-8"}),
    # What it computes is longer than a short request, so that stock's operator computes the private part.
    Ask(prompt(A, C, lead=LEAD, query=[*B, *B]), max_tokens=12),
)


def questions(count: int) -> list[Ask]:
    """Prompts of the demo model: a system prompt, eight documents, a question about one."""
    sys.path.insert(0, str(EXAMPLES / "models" / "tiny-hybrid-qa"))
    from gen import prompt as generate

    found = []
    for seed in range(count):
        made = generate(20_000_500 + seed, 8, 64, "one", facts=2)
        tokens = prompt(*made["docs"], lead=made["system"], query=made["question"])
        found.append(Ask(tuple(DEMO_SEP if t == SEP else t for t in tokens), 6, sampling=STOP))
    return found


def test_a_trained_hybrid_answers_as_without(start_engine: EngineFactory, demo_model: Path) -> None:
    asks, options = questions(8), {"tokens": {"sep": "<sep>"}}
    plain = Ask(tuple(t for t in asks[0].tokens if t != DEMO_SEP), 6, sampling=STOP)
    with start_engine(demo_model, options=options) as exact:
        expected = exact.ask_one_by_one(*asks)
    with start_engine(demo_model, hypic=False, kv_cache_dtype="fp8") as stock:
        (of_stock,) = stock.ask(plain)
    with start_engine(demo_model, options=options, kv_cache_dtype="fp8") as ours:
        cold, warm = ours.ask_one_by_one(*asks), ours.ask_one_by_one(*asks)
        (ordinary,) = ours.ask(plain)
    assert same(ordinary, of_stock)
    assert all(same(one, other) for one, other in zip(cold, warm, strict=True))
    for found, exactly in zip(warm, expected, strict=True):
        assert found.tokens == exactly.tokens
        assert distance(found, exactly) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "float32"), ("fp8_e5m2", "bfloat16")])
def test_cold_and_warm(kind: str, dtype: str, start_engine: EngineFactory, attention_model: Path) -> None:
    plain = ASKS[0].plain()
    with start_engine(attention_model, hypic=False, dtype=dtype, kv_cache_dtype=kind) as stock:
        (of_stock,) = stock.ask(plain)
    with start_engine(attention_model, dtype=dtype, kv_cache_dtype=kind) as ours:
        cold, warm = ours.ask_one_by_one(*ASKS), ours.ask_one_by_one(*ASKS)
        full, ordinary = ours.ask_one_by_one(Ask(ASKS[0].tokens, 12, {"hypic_link": "full"}), plain)
    assert all(same(one, other) for one, other in zip(cold, warm, strict=True))
    assert same(ordinary, of_stock) and full.tokens == of_stock.tokens
