"""Mamba2 layers (Nemotron-H, Granite 4, Falcon-H1, Zamba2): a transition is a number a head.

Behind one layer composing is exact by the affine law, if only the seam covers what the convolution sees: so
ordinary requests of the same engine are the yardstick, in float32 to the last digits.  Whole models are held
against an oracle in ``test_mamba2_oracle.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_segments, save_mamba2_model
from oracle.mamba2_models import ARCHITECTURES, FULL, LINEAR

from vllm_hypic.harness.client import completion, separator_of
from vllm_hypic.harness.cluster import Cluster, Setup
from vllm_hypic.patches import cpu_mamba2_checkpoints

from . import tiny_models
from .conftest import EngineFactory
from .engines import SEP, Ask, Engine, audit, prompt, run_apart, same, worker_of
from .test_short_conv import first_token

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([40, 150, 70, 333, 21], vocab=480)
SEGMENTS = [FIRST, SECOND, THIRD]
COMPOSED = Ask(prompt(*SEGMENTS, lead=LEAD, query=QUERY))
BEHIND_A_TAIL = Ask(prompt(*SEGMENTS, lead=LEAD, query=QUERY[:1]), extra={"hypic_link": "seam-8-0"})
"""Its query of one token stands right behind the last record."""

BOUND = {"float32": 2e-5, "bfloat16": 0.05}
"""On logprobs of the whole vocabulary, whose standard deviation is 2.5."""
SEEN = {"float32": 500.0, "bfloat16": 3.0}
"""So many bounds are requests away whose transitions are left out."""

ONE_LAYER: dict[str, dict[str, Any]] = {
    "NemotronH": {"layers_block_type": [LINEAR, FULL], "silent": ("layers.1.mixer.o_proj",)},
    "GraniteMoeHybrid": {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "silent": ("self_attn.o_proj",),
    },
    "FalconH1": {"num_hidden_layers": 1, "silent": ("self_attn.o_proj",)},
    "Zamba2": {"num_hidden_layers": 1, "layers_block_type": ["hybrid"], "silent": ("layers.0.linear.",)},
    "Mamba2": {"num_hidden_layers": 1},
}
"""One Mamba2 layer, and attention behind or beside it that adds nothing, or none."""


def model_of(folder: Path, log: Path, name: str, **fields: Any) -> Path:
    return run_apart(partial(save_mamba2_model, **fields), folder, name, log=log)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    # What no vector holds of a batch's steps goes through scalar code in stock vLLM, with other last bits.
    heads = {"mamba_num_heads": 32, "mamba_head_dim": 16}
    folder = tmp_path_factory.mktemp("shallow")
    return model_of(folder, engine_logs / "models.log", "NemotronH", **ONE_LAYER["NemotronH"], **heads)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    return model_of(tmp_path_factory.mktemp("deep"), engine_logs / "models.log", "NemotronH")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, shallow: Path
) -> Iterator[tuple[Engine, str]]:
    dtype: str = request.param
    with module_engine(shallow, dtype=dtype, max_logprobs=-1, enable_prefix_caching=False) as started:
        yield started, dtype


def forget_transitions(llm: Any) -> int:
    """Makes the transition of all records 1; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.log_transition.zero_()
    return len(pool.linear)


def exact(engine: Engine, bound: float, seen: float = 6.0) -> None:
    """One layer: composed requests are full recompute, and `seen` bounds away if transitions are left out."""
    engine.reset()
    for ask in (COMPOSED, BEHIND_A_TAIL):
        plain = first_token(engine, ask.plain())
        for seam in ({}, {"hypic_seam_tokens": 3}, {"hypic_seam_tokens": 20}):
            found = float((first_token(engine, replace(ask, extra=ask.extra | seam)) - plain).abs().max())
            assert found <= bound, f"{seam}: {found:.1e}"
    plain = first_token(engine, COMPOSED.plain())
    naive = first_token(engine, replace(COMPOSED, extra={"hypic_link": "naive"}))
    assert float((naive - plain).abs().max()) > seen * bound, "leaving T out goes unseen"


def test_one_layer_is_full_recompute(engine: tuple[Engine, str]) -> None:
    running, dtype = engine
    exact(running, BOUND[dtype], SEEN[dtype])
    assert running.call(forget_transitions) == 1
    forgotten = first_token(running, COMPOSED)
    naive = first_token(running, replace(COMPOSED, extra={"hypic_link": "naive"}))
    assert torch.equal(forgotten, naive), "transitions come from elsewhere than the records"
    running.reset()


def test_cold_and_warm_are_bit_identical(engine: tuple[Engine, str]) -> None:
    """And what is generated goes on as behind a full recompute."""
    running, dtype = engine
    running.reset()
    cold, warm, plain = running.ask_one_by_one(COMPOSED, COMPOSED, COMPOSED.plain())
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    if dtype == "float32":
        assert warm.tokens == plain.tokens
        for ours, theirs in zip(warm.logprobs[0], plain.logprobs[0], strict=True):
            assert max(abs(ours[t] - theirs[t]) for t in ours.keys() & theirs.keys()) <= BOUND[dtype]
    left = running.call(audit)
    assert left.clean, left


def plain_asks() -> list[Ask]:
    """Of several lengths, that generate beside one another."""
    asks = [COMPOSED, BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)), Ask(tuple(QUERY[:1]))]
    return [replace(ask.plain(), max_tokens=6 + 4 * i) for i, ask in enumerate(asks)]


def test_plain_requests_are_stock_bit_for_bit(
    engine: tuple[Engine, str], start_engine: EngineFactory, shallow: Path
) -> None:
    running, dtype = engine
    with start_engine(shallow, hypic=False, dtype=dtype, enable_prefix_caching=False) as stock:
        theirs = stock.ask(*plain_asks())
    assert all(map(same, running.ask(*plain_asks()), theirs))


def test_a_plain_request_beside_composed_ones(engine: tuple[Engine, str]) -> None:
    """One batch of all kinds: each answers as it does alone."""
    running, dtype = engine
    running.reset()
    asks = [COMPOSED, COMPOSED.plain(), BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)).plain()]
    asks = [replace(ask, max_tokens=1, sampling={"logprobs": -1}) for ask in asks]
    for alone, beside in zip(running.ask_one_by_one(*asks), running.ask(*asks), strict=True):
        error = max(abs(alone.first[i] - beside.first[i]) for i in range(512))
        assert error <= BOUND[dtype]


def rows_apart(llm: Any) -> list[bool]:
    """Stock code over a batch of two decodes and three prefills, one of which goes on, and over two
    sub-batches of it: whether outputs and both states have the same bits."""
    from vllm.forward_context import set_forward_context

    from vllm_hypic.backends.linear.layout import StockRows
    from vllm_hypic.backends.linear.mamba2.cpu import HypicCPUMamba2, ProjectedRows

    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    layer = next(found for found in layers if isinstance(found, HypicCPUMamba2))
    starts, computed = [0, 1, 2, 72, 77, 107], [130, 7, 0, 64, 0]
    width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    rng = torch.Generator().manual_seed(0)
    dtype = layer.conv_weights.dtype
    x = ProjectedRows(torch.randn(starts[-1], width, generator=rng).to(dtype))
    before = [torch.randn(state[1:6].shape, generator=rng).to(state.dtype) for state in layer.kv_cache]

    class Whole:
        state_indices_tensor_d = torch.tensor([[1], [2]], dtype=torch.int32)
        state_indices_tensor_p = torch.tensor([3, 4, 5], dtype=torch.int32)
        seq_lens, chunk_size = torch.full((5,), 200), 128

    def run(requests: list[int]) -> list[torch.Tensor]:
        for state, values in zip(layer.kv_cache, before, strict=True):
            state[1:6] = values
        spans = [torch.arange(starts[i], starts[i + 1]) for i in requests]
        ends = torch.tensor([0, *map(len, spans)]).cumsum(0).tolist()
        rows = StockRows(
            sum(i < 2 for i in requests), torch.cat(spans), ends, requests, [computed[i] for i in requests]
        )
        out = torch.zeros(ends[-1], layer.tped_intermediate_size, dtype=dtype)
        metadata = layer.sub_batch(NotImplemented, Whole, rows)
        with set_forward_context({layer.prefix: metadata}, config), torch.inference_mode():
            layer.run_stock(x.part(rows.tokens), out)
        slots = torch.tensor(requests) + 1
        return [*out.split([len(s) for s in spans]), *(state[slots] for state in layer.kv_cache)]

    outputs = run([*range(5)])
    *whole, conv, ssm = outputs
    found = []
    for requests in ([0, 3], [1, 2, 4]):
        *apart, its_conv, its_ssm = run(requests)
        found += [torch.equal(whole[i], y) for i, y in zip(requests, apart, strict=True)]
        found += [torch.equal(conv[requests], its_conv), torch.equal(ssm[requests], its_ssm)]
    return found


def test_stock_code_gives_rows_apart_the_same_bits(engine: tuple[Engine, str]) -> None:
    running, _ = engine
    running.reset()
    assert running.call(rows_apart) == [True] * 9


# -- prefix cache ----------------------------------------------------------------------------------------

PARTS = random_segments([700, 60, 350], vocab=480, seed=21)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.fast("float32")
def test_prefix_cache(dtype: str, start_engine: EngineFactory, deep: Path) -> None:
    """Plain requests that find one another's blocks, as in a stock engine that is mended alike."""
    question, more, other = PARTS
    turns = [question, [*question, *more], [*question, *other], question]
    asks = [Ask(tuple(turn), max_tokens=4) for turn in turns]
    chunks = {"max_num_batched_tokens": 512, "dtype": dtype}
    with start_engine(deep, hypic=False, mended=cpu_mamba2_checkpoints.apply, **chunks) as stock:
        theirs = stock.ask_one_by_one(*asks)
    with start_engine(deep, **chunks) as engine:
        ours = engine.ask_one_by_one(*asks)
    assert [a.cached for a in ours] == [a.cached for a in theirs] and ours[1].cached > 0
    assert all(map(same, ours, theirs))


# -- further models and states ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ONE_LAYER if name != "NemotronH"])
def test_one_layer_of_other_models(
    name: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    model_of(tmp_path, engine_logs / "models.log", name, **ONE_LAYER[name])
    with start_engine(tmp_path, dtype="float32", max_logprobs=-1, enable_prefix_caching=False) as engine:
        exact(engine, BOUND["float32"], SEEN["float32"])


@pytest.mark.slow
def test_experts(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    """Granite's mixture: the same layers, other MLPs."""
    fields = ARCHITECTURES["GraniteMoeHybrid"] | {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    }
    save = partial(tiny_models.save, silent=("self_attn.o_proj",))
    run_apart(save, tmp_path, "GraniteMoeHybrid", fields, log=engine_logs / "models.log")
    with start_engine(tmp_path, dtype="float32", max_logprobs=-1, enable_prefix_caching=False) as engine:
        exact(engine, BOUND["float32"], SEEN["float32"])


@pytest.mark.slow
def test_states_in_bfloat16(start_engine: EngineFactory, shallow: Path) -> None:
    """As vLLM keeps them where a model does not say."""
    args: dict[str, Any] = {"mamba_ssm_cache_dtype": "bfloat16", "enable_prefix_caching": False}
    with start_engine(shallow, hypic=False, **args) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(shallow, max_logprobs=-1, **args) as engine:
        assert all(map(same, engine.ask(*plain_asks()), theirs))
        exact(engine, BOUND["bfloat16"], SEEN["bfloat16"])
        engine.reset()
        assert same(*engine.ask_one_by_one(COMPOSED, COMPOSED))


@pytest.mark.slow
def test_compiled(start_engine: EngineFactory, shallow: Path, tmp_path: Path) -> None:
    """Plain requests are those of a compiled stock engine."""
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    args: dict[str, Any] = {"env": env, "dtype": "float32", "max_logprobs": -1, "enforce_eager": False}
    args["enable_prefix_caching"] = False
    with start_engine(shallow, hypic=False, **args) as stock:
        theirs = first_token(stock, COMPOSED.plain())
    with start_engine(shallow, **args) as engine:
        assert torch.equal(first_token(engine, COMPOSED.plain()), theirs)
        assert float((first_token(engine, COMPOSED) - theirs).abs().max()) <= BOUND["float32"]


# -- records elsewhere -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_servers_and_a_router(deep: Path) -> None:
    """One has the segments prefilled by the others, and answers as it does alone."""
    lead, *segments, query = random_segments([160, 480, 64, 320, 96, 224, 400, 24], vocab=480, seed=5)
    with Cluster(Setup(deep, context=4096, cache_bytes=1 << 26, pool_bytes=1 << 26)) as cluster:
        (combine,) = cluster.combines
        separator = separator_of(combine.url)
        tokens = [separator if token == SEP else token for token in prompt(*segments, lead=lead, query=query)]
        body = {"prompt": tokens, "max_tokens": 6, "ignore_eos": True}
        together = completion(cluster.router.url, body, timeout_s=60)
        alone = completion(combine.url, {**body, "cache_salt": "alone"}, timeout_s=60)
    assert together.same_as(alone)
    found = together.breakdown
    assert found is not None and found.segments is not None
    assert (found.kind, found.local) == ("parallel", 0)
    assert [part.source for part in found.segments] == ["dispatched"] * 7
