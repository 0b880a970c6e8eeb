"""The engine's first-token distribution against an independent oracle in float64.

The yardstick is the engine itself: how far ordinary requests are from the oracle's full recompute
(bfloat16 noise).  A composed request may be as far from the oracle's composed answer, and must be much
farther from every answer with a planted fault.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from lib.oracle import FAULTS, Oracle, random_segments

from .conftest import EngineFactory
from .engines import Ask, Engine, prompt

LENGTHS = [[40, 150, 70, 333, 21], [64, 97, 200, 65, 5], [33, 128, 128, 81, 330]]
"""Leading segment, three interior segments, query; the last stream is longer than a KV block."""
VOCABULARY = 512
NOISE_FACTOR = 1.6
"""Composed answers may be this much farther from the oracle than ordinary ones: averages over three
prompts of a maximum scatter."""
KL_FACTOR = 4

Parts = tuple[list[int], list[list[int]], list[int]]
"""Leading segment, interior segments, query."""


@dataclass(frozen=True)
class Distance:
    """Largest difference of a logprob and KL divergence, averaged over prompts."""

    largest: float
    kl: float

    def __str__(self) -> str:
        return f"max {self.largest:.3f}, KL {self.kl:.1e}"

    def margin(self, noise: Self) -> float:
        """The factor by which this exceeds one of both bounds; up to 1 it exceeds none."""
        return max(self.kl / (KL_FACTOR * noise.kl), self.largest / (NOISE_FACTOR * noise.largest))


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Distance:
    pairs = list(zip(ours, theirs, strict=True))
    largest = sum(float((a - b).abs().max()) for a, b in pairs) / len(pairs)
    kl = sum(float((b.exp() * (b - a)).sum()) for a, b in pairs) / len(pairs)
    return Distance(largest, kl)


def texts() -> list[Parts]:
    cut = (random_segments(lengths, vocab=480, seed=seed) for seed, lengths in enumerate(LENGTHS))
    return [(lead, segments, query) for lead, *segments, query in cut]


def whole(lead: Sequence[int], segments: Sequence[Sequence[int]], query: Sequence[int]) -> list[int]:
    """The logical prompt."""
    return [*lead, *chain(*segments), *query]


def first_token(engine: Engine, tokens: Sequence[int], extra: dict[str, Any] | None = None) -> torch.Tensor:
    """Logprobs ``[vocabulary]`` float64 of the first generated token."""
    (answer,) = engine.ask(Ask(tuple(tokens), 1, extra or {}, sampling={"logprobs": -1}))
    return torch.tensor([answer.first[token] for token in range(len(answer.first))], dtype=torch.float64)


@pytest.fixture(scope="module")
def oracle(hybrid_model: Path) -> Oracle:
    return Oracle(hybrid_model)


@pytest.fixture(scope="module", params=[4096, 96], ids=["whole", "chunks-of-96"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, hybrid_model: Path
) -> Iterator[Engine]:
    with module_engine(hybrid_model, max_num_batched_tokens=request.param, max_logprobs=-1) as started:
        yield started


def noise_of(engine: Engine, oracle: Oracle) -> Distance:
    """How far ordinary requests of this engine are from full recompute."""
    plain = [whole(*parts) for parts in texts()]
    return distance([first_token(engine, t) for t in plain], [oracle.full_logprobs(t) for t in plain])


TEXTS = tuple(texts())


def composed_by(
    engine: Engine, prompts: Sequence[Parts] = TEXTS, extra: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """The engine's answers to composed requests."""
    return [first_token(engine, prompt(*s, lead=lead, query=query), extra) for lead, s, query in prompts]


def expected_by(oracle: Oracle, prompts: Sequence[Parts] = TEXTS, **method: Any) -> list[torch.Tensor]:
    """The oracle's answers to the same requests."""
    return [oracle.next_token_logprobs(*parts, **method) for parts in prompts]


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hypic-8": ({"hypic_seam_tokens": 8}, {"head": 8, "tail": 8}),
    "hypic-3": ({"hypic_seam_tokens": 3}, {"head": 3, "tail": 3}),
    "hypic-16": ({"hypic_seam_tokens": 16}, {"head": 16, "tail": 16}),
    "hypic-0": ({"hypic_seam_tokens": 0}, {"head": 0, "tail": 0}),
    "seam-3-12": ({"hypic_link": "seam-3-12"}, {"head": 3, "tail": 12}),
    "seam-4-0+32": ({"hypic_link": "seam-4-0+32"}, {"head": 4, "tail": 0, "anchor": 32}),
    "epic-8": ({"hypic_link": "epic-8"}, {"head": 8, "tail": 0}),
    "block": ({"hypic_link": "block"}, {"head": 0, "tail": 0}),
    "naive": ({"hypic_link": "naive"}, {"head": 8, "tail": 8, "compose_T": False}),
}
"""Link methods: what a request says, and what the oracle is told."""


@pytest.mark.parametrize("method", METHODS)
def test_agrees(engine: Engine, oracle: Oracle, noise: Distance, method: str) -> None:
    extra, options = METHODS[method]
    found = distance(composed_by(engine, extra=extra), expected_by(oracle, **options))
    assert found.margin(noise) <= 1, f"{found}; ordinary requests: {noise}"


IN_STREAM = {"in_stream": frozenset({1})}
OTHER_PROMPTS = [
    pytest.param([([], segments, query) for _, segments, query in texts()], {}, id="no-leading-segment"),
    # A segment of 20 tokens between two cached ones is computed in the stream.
    pytest.param(
        [(lead, [a, b[:20], c], q) for lead, (a, b, c), q in texts()], IN_STREAM, id="short-segment"
    ),
]


@pytest.mark.parametrize(("prompts", "method"), OTHER_PROMPTS)
def test_other_prompts(
    engine: Engine, oracle: Oracle, noise: Distance, prompts: list[Parts], method: dict[str, Any]
) -> None:
    found = distance(composed_by(engine, prompts), expected_by(oracle, prompts, **method))
    assert found.largest <= NOISE_FACTOR * noise.largest, f"{found}; ordinary requests: {noise}"


@pytest.fixture(scope="module")
def composed(engine: Engine) -> list[torch.Tensor]:
    return composed_by(engine)


UNSEEN = ("forget_left", "state_over_head", "early_visibility")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in UNSEEN])
def test_planted_faults_are_seen(
    composed: list[torch.Tensor], oracle: Oracle, noise: Distance, fault: str
) -> None:
    """Were the engine to make this mistake, a bound of ``test_agrees`` would be broken, with a margin."""
    found = distance(composed, expected_by(oracle, fault=fault))
    assert found.margin(noise) > 1.2, f"{fault}: {found}; noise {noise}"


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-3), ("float16", 0.06)])
def test_other_dtypes(module_engine: EngineFactory, attention_model: Path, dtype: str, bound: float) -> None:
    """fp32 leaves no room for errors to hide in: the engine must be within rounding of the oracle."""
    with module_engine(attention_model, max_logprobs=-1, dtype=dtype) as engine:
        found = distance(composed_by(engine, texts()[:1]), expected_by(Oracle(attention_model), texts()[:1]))
    assert found.largest <= bound, f"{dtype}: {found}"
