"""What must be equal bit for bit, or token for token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EXAMPLES, EngineFactory
from .engines import Ask, Engine, prompt, worker_of

MAX_TOKENS = 12


def calls(llm: Any) -> dict[str, int]:
    """How often each of the plugin's operators ran so far."""
    return dict(worker_of(llm).runtime.calls)


def asks(seed: int) -> list[Ask]:
    lead, a, b, c, query = random_segments([50, 140, 310, 77, 19], vocab=480, seed=seed)
    return [
        Ask(prompt(a, b, c, lead=lead, query=query), MAX_TOKENS),
        Ask(prompt(c, a, query=query), MAX_TOKENS, {"hypic_seam_tokens": 4}),
        Ask(prompt(b, b, lead=lead, query=query), MAX_TOKENS, {"hypic_link": "epic-8"}),
    ]


@pytest.fixture(scope="module", params=[4096, 128], ids=["whole", "chunks-of-128"])
def chunked(
    request: pytest.FixtureRequest, module_engine: EngineFactory, hybrid_model: Path
) -> Iterator[Engine]:
    with module_engine(
        hybrid_model, max_num_batched_tokens=request.param, enable_prefix_caching=False
    ) as engine:
        yield engine


@pytest.mark.parametrize("seed", [0, 1])
def test_cold_and_warm_are_bit_identical(chunked: Engine, seed: int) -> None:
    chunked.reset()
    for ask in asks(seed):
        cold, warm = chunked.ask_one_by_one(ask, ask)
        assert cold.samples == warm.samples
        assert cold.logprobs == warm.logprobs
        assert warm.cached > cold.cached


def test_reordered_documents_reuse_the_records(hypic: Engine) -> None:
    lead, a, b, c, query = random_segments([50, 140, 310, 77, 19], vocab=480, seed=3)
    first, second = hypic.ask_one_by_one(
        Ask(prompt(a, b, c, lead=lead, query=query)), Ask(prompt(c, a, b, lead=lead, query=query))
    )
    assert first.cached == 0
    assert second.cached == 50 + 140 + 310 + 77 - 3 * 16  # all but the seam windows


def test_leading_segment_gives_stock_tokens(module_engine: EngineFactory, demo_model: Path) -> None:
    """The record of a leading segment is the ordinary prefix, so nothing is approximate.

    Asked of the trained model: a random one has near ties that bfloat16 decides by batch shape.
    """
    questions = demo_questions(12)
    stop = {"ignore_eos": False}  # what follows an answer was never trained
    plain = [Ask((*c, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    composed = [Ask((*c, DEMO_SEP, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    with module_engine(demo_model, hypic=False) as engine:
        expected = engine.ask_one_by_one(*plain)
    with module_engine(demo_model, options={"tokens": {"sep": "<sep>"}}) as engine:
        found = engine.ask_one_by_one(*composed)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens


DEMO_SEP = 4
"""``<sep>`` of the demo model's vocabulary."""


def demo_questions(count: int) -> list[tuple[list[int], list[int]]]:
    """System prompt with eight documents in a row, and the question, of held-out seeds."""
    sys.path.insert(0, str(EXAMPLES / "models" / "tiny-hybrid-qa"))
    from gen import prompt as generate_prompt

    found = []
    for seed in range(count):
        made = generate_prompt(20_000_500 + seed, 8, 64, "one", facts=2)
        found.append(([*made["system"], *(t for d in made["docs"] for t in d)], made["question"]))
    return found


def test_plain_requests_are_stock_bit_for_bit(hypic: Engine, stock: Engine) -> None:
    """Same tokens, same logprobs, and none of our operators runs."""
    plain = [a.plain() for seed in range(3) for a in asks(seed)]
    before = hypic.call(calls)
    ours, theirs = hypic.ask(*plain), stock.ask(*plain)
    for a, b in zip(ours, theirs, strict=True):
        assert a.samples == b.samples
        assert a.logprobs == b.logprobs
    assert hypic.call(calls) == before


def test_opting_out_is_plain(hypic: Engine, stock: Engine) -> None:
    """``full`` strips the separators and is an ordinary request."""
    (ask, *_) = asks(7)
    before = hypic.call(calls)
    (ours,) = hypic.ask(Ask(ask.tokens, MAX_TOKENS, {"hypic_link": "full"}))
    (theirs,) = stock.ask(ask.plain())
    assert ours.samples == theirs.samples
    assert ours.logprobs == theirs.logprobs
    assert hypic.call(calls) == before


def test_two_runs_of_the_same_documents_share_pages(hypic: Engine) -> None:
    lead, a, b, query, other = random_segments([50, 140, 310, 19, 30], vocab=480, seed=5)
    hypic.ask(Ask(prompt(a, b, lead=lead, query=query)), Ask(prompt(b, a, lead=lead, query=other)))
    assert hypic.call(records) == 3


def records(llm: Any) -> int:
    from .engines import scheduler_of

    return len(scheduler_of(llm).hypic.directory)
