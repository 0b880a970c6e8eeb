"""Gemma 3n and Gemma 4 in real engines: their last layers have no K and V, they read those of earlier layers.

The oracle is transformers' forward with a mask; see :mod:`oracle.masked`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import MaskedOracle
from oracle.models import save_shared_kv_model

from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, audit, prompt, run_apart, same, worker_of
from .test_contexts_and_islands import whole
from .test_oracle_agreement import NOISE_FACTOR, Distance, distance, first_token, texts

EXACT = 2e-3
"""Largest difference of a logprob in float32."""
FAULTS = [
    "readers_without_public",
    "wrong_rotation",
    "stream_positions",
    "early_visibility",
    "stream_windows",
    "public_without_windows",
]


@pytest.fixture(scope="module", params=["Gemma3nText", "Gemma4Text"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    save = partial(save_shared_kv_model, name=name, window=40)
    return run_apart(save, tmp_path_factory.mktemp(name) / "model", log=engine_logs / "models.log")


@pytest.fixture(scope="module")
def oracle(model: Path, name: str) -> MaskedOracle:
    return MaskedOracle(model, by_embeddings=name == "Gemma3nText")


@dataclass(frozen=True)
class Served:
    """An engine and how far a composed answer may be from the oracle's."""

    engine: Engine
    bound: float


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, module_engine: EngineFactory, model: Path, oracle: MaskedOracle
) -> Iterator[Served]:
    with module_engine(model, dtype=request.param, max_logprobs=-1, max_num_batched_tokens=256) as engine:
        plain = [whole(*parts) for parts in texts()]
        full = [oracle.full_logprobs(tokens) for tokens in plain]
        noise = distance([first_token(engine, tokens) for tokens in plain], full).largest
        assert request.param != "float32" or noise < EXACT, "vLLM's own code disagrees with transformers"
        yield Served(engine, EXACT if request.param == "float32" else NOISE_FACTOR * noise)


def compare(served: Served, oracle: MaskedOracle, seam: int, fault: str | None = None) -> Distance:
    ours, theirs = [], []
    for lead, segments, query in texts():
        tokens = prompt(*segments, lead=lead, query=query)
        ours.append(first_token(served.engine, tokens, {"hypic_seam_tokens": seam}))
        theirs.append(oracle.next_token_logprobs(lead, segments, query, head=seam, tail=seam, fault=fault))
    return distance(ours, theirs)


@pytest.mark.parametrize("seam", [8, 0])
def test_agrees(served: Served, oracle: MaskedOracle, seam: int) -> None:
    assert compare(served, oracle, seam).largest <= served.bound
    assert served.engine.call(audit).clean


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(served: Served, oracle: MaskedOracle, fault: str) -> None:
    factor = 100 if served.bound == EXACT else 1.1  # bfloat16 tells the smallest by little
    assert compare(served, oracle, 8, fault).largest > factor * served.bound


def test_generated_tokens(served: Served, oracle: MaskedOracle) -> None:
    """Blocks before their windows have been given away."""
    lead, segments, query = texts()[0]
    ask = Ask(prompt(*segments, lead=lead, query=query), 60, sampling={"logprobs": -1})
    (answer,) = served.engine.ask(ask)
    expected = oracle.next_token_logprobs(lead, segments, query, generated=answer.tokens[:-1])
    got = torch.tensor([answer.logprobs[0][-1][token] for token in range(len(expected))], dtype=torch.float64)
    assert distance([got], [expected]).largest <= 2 * served.bound


def owners(llm: Any) -> tuple[list[str], int, int]:
    """Layers that records hold K and V of, and bytes of a token: in them, and as the pool counts them."""
    geometry = worker_of(llm).geometry
    each = sum(2 * a.kv_heads * a.head_size * a.dtype.itemsize for a in geometry.attention)
    return [a.layer for a in geometry.attention], each, geometry.page_bytes // geometry.page_tokens


def test_records_hold_what_layers_own(served: Served) -> None:
    layers, each, counted = served.engine.call(owners)
    assert [layer.split(".")[2] for layer in layers] == ["0", "1", "2"] and each == counted
    served.engine.reset()
    lead, segments, query = texts()[0]
    ask = Ask(prompt(*segments, lead=lead, query=query))
    cold, warm = served.engine.ask_one_by_one(ask, ask)
    assert warm.cached > cold.cached == 0 and same(cold, warm)


def test_plain_requests_have_stock_bits(module_engine: EngineFactory, model: Path) -> None:
    asks = [Ask(tuple(whole(*parts)), 8) for parts in texts()]
    found = []
    for hypic in (True, False):
        with module_engine(model, hypic=hypic) as engine:
            found.append(engine.ask_one_by_one(*asks))
    assert all(same(ours, stock) for ours, stock in zip(*found, strict=True))


def test_fast_prefill_is_refused(start_engine: EngineFactory, model: Path) -> None:
    with pytest.raises(EngineError, match="--kv-sharing-fast-prefill") as error:
        start_engine(model, kv_sharing_fast_prefill=True)
    assert error.value.kind == "ConfigError"
