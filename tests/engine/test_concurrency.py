"""Many requests at once, with small chunks, preemption and a pool of three segments.

Batching changes results a little even in stock vLLM (kernels sum in another order). So the yardstick is
stock vLLM on the same logical prompts, concurrent against one by one, measured here: ours may differ
no more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle.models import random_segments

from .conftest import EngineFactory, tight_args
from .engines import Answer, Ask, Engine, metrics, prompt

REQUESTS = 32
NOISE_FACTOR = 1.5
"""Ours may have this multiple of stock's noise ..."""
MAX_FLOOR, MEAN_FLOOR = 0.05, 0.005
"""... and this much on top, in nats."""
AGREEMENT_SLACK = 0.15


LINKS: list[dict[str, Any]] = [
    {},
    {"hypic_seam_tokens": 16},
    {"hypic_link": "block"},
    {"hypic_link": "hypic", "hypic_seam_tokens": 4},
    {"hypic_link": "epic-16"},
]


def mixed_asks(seed: int, islands: int = 0) -> list[Ask]:
    """Plain prompts and prompts of one to five of eight documents, with and without a leading segment, of
    several link methods and seam widths; a few are sampled twice.  All with ``islands`` (percent) or none."""
    chosen_windows = {"hypic_islands": f"query-{islands}" if islands else "none"}
    rng = random.Random(seed)
    documents = random_segments([rng.randrange(60, 320) for _ in range(8)], seed=seed + 1)
    leads = random_segments([90, 150], seed=seed + 2)
    asks = []
    for i in range(REQUESTS):
        length = rng.randrange(8, 25)
        # Without a seed: stock vLLM cannot rewind a CPU generator after a prefill chunk.
        sampling: dict[str, Any] = {"n": 2, "temperature": 0.8} if i % 8 == 5 else {}
        query_length = rng.randrange(5, 600)
        if i < 12:
            # Many of these run at the same time and need one more block while they decode.
            computed = 4 * 8 + (len(documents[0]) + len(documents[1]) - 4 * 8) * islands // 100
            query_length = 256 * rng.randrange(1, 3) - computed % 256 - rng.randrange(1, 8)
        (query,) = random_segments([query_length], seed=100 * seed + i + 3)
        if i % 4 == 3:
            asks.append(Ask((*rng.choice(documents), *query), length, sampling=sampling))
        elif i < 12:
            chosen = rng.sample(documents[:2], 2)
            asks.append(Ask(prompt(*chosen, query=query), length, chosen_windows, sampling=sampling))
        else:
            chosen = rng.sample(documents, rng.randrange(1, 6))
            lead = rng.choice([[], *leads])
            extra = rng.choice(LINKS) | chosen_windows
            asks.append(Ask(prompt(*chosen, query=query, lead=lead), length, extra, sampling=sampling))
    return asks


@dataclass(frozen=True)
class Noise:
    """Differences between two runs of the same requests: of first-token logprobs over the tokens that both
    report, and the share of greedily generated tokens that are equal, place by place."""

    first_max: float
    first_mean: float
    agreement: float


def noise(asks: list[Ask], one: list[Answer], other: list[Answer]) -> Noise:
    differences = []
    same = total = 0
    for ask, a, b in zip(asks, one, other, strict=True):
        assert [len(s) for s in a.samples] == [len(s) for s in b.samples] == [ask.max_tokens] * len(a.samples)
        common = a.first.keys() & b.first.keys()
        assert len(common) >= 10, "the two runs share hardly any likely token"
        differences += [abs(a.first[t] - b.first[t]) for t in common]
        if "temperature" not in ask.sampling:
            same += sum(t == u for t, u in zip(a.tokens, b.tokens, strict=True))
            total += len(a.tokens)
    return Noise(max(differences), sum(differences) / len(differences), same / total)


def measure(engine: Engine, asks: list[Ask]) -> Noise:
    engine.reset()
    alone = engine.ask_one_by_one(*asks)
    engine.reset()
    return noise(asks, alone, engine.ask(*asks))


@pytest.fixture(scope="module")
def stock_tight(module_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return module_engine(hybrid_model, hypic=False, **tight_args())


@pytest.mark.fast("islands")
@pytest.mark.parametrize("islands", [pytest.param(0, id="seams"), pytest.param(30, id="islands")])
def test_concurrent_requests_give_the_results_of_one_by_one(
    tight: Engine, stock_tight: Engine, islands: int
) -> None:
    asks = mixed_asks(0, islands)
    stock = measure(stock_tight, [a.plain() for a in asks])
    before = tight.call(metrics)
    ours = measure(tight, asks)
    named = ("preemptions", "segments", "evictions", "pool_waits")
    after = {k: v for k, v in tight.call(metrics).items() if any(name in k for name in named)}
    counted = {k: v - before.get(k, 0) for k, v in after.items()}
    numbers = f"ours {ours}, stock {stock}, counters {counted}"
    print(numbers)

    assert counted["vllm:num_preemptions"] > 0, f"no request was preempted: {numbers}"
    assert counted["vllm:hypic_evictions"] > 0, f"the pool was never short: {numbers}"
    assert counted["vllm:hypic_segments_hit"] > 0, f"no record was reused: {numbers}"
    assert ours.first_max <= NOISE_FACTOR * stock.first_max + MAX_FLOOR, numbers
    assert ours.first_mean <= NOISE_FACTOR * stock.first_mean + MEAN_FLOOR, numbers
    assert ours.agreement >= stock.agreement - AGREEMENT_SLACK, numbers
