"""Every family's requests preempted and evicted, and its records from a disk and from another instance.

As :mod:`test_concurrency`, :mod:`test_store` and :mod:`test_transfer` have it of the gated delta net.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    random_segments,
    save_mamba1_model,
    save_mamba2_model,
    save_mla_model,
    save_olmo_model,
    save_short_conv_model,
)
from oracle.bailing_models import save_bailing_model
from oracle.fla_models import save_fla_model
from oracle.models import save_shared_kv_model, save_windowed_model

from vllm_hypic.harness.processes import free_port
from vllm_hypic.harness.random_kimi import save_kimi_model
from vllm_hypic.harness.random_ring import save_ring_model
from vllm_hypic.patches import (
    cpu_bailing_recurrence,
    cpu_kimi_recurrence,
    cpu_mamba1,
    cpu_olmo_recurrence,
)
from vllm_hypic.segment_parallel.sender import Sender

from . import test_transfer
from .conftest import EngineFactory, tight_args, tight_options
from .engines import Ask, audit, metrics, pool_unit_bytes, prompt, run_apart, same, store_of
from .staged_copies import staged
from .test_concurrency import MAX_FLOOR, NOISE_FACTOR, measure, mixed_asks
from .test_mla import CPU_MLA
from .test_short_conv import STOCK

pytestmark = pytest.mark.slow

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([40, 150, 70, 333, 21], vocab=480)
COMPOSED = Ask(prompt(FIRST, SECOND, THIRD, lead=LEAD, query=QUERY))
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """``save`` writes a tiny model of it; ``blocks``: KV blocks that some of 32 requests do not get;
    ``mended``: without it stock vLLM does not run the model; ``grows``: requests take more blocks as they go
    on, so some are preempted; ``stock``: what a stock engine needs to run it in float32, ``args``: any
    engine."""

    save: Callable[[Path], Any]
    blocks: int
    mended: Callable[[], None] | None = None
    grows: bool = True
    stock: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "short-convolutions": Family(
        partial(save_short_conv_model, layer_types=["conv", "conv", FULL, "conv", FULL]), 26
    ),
    "mamba2": Family(partial(save_mamba2_model, name="NemotronH"), 26),
    "olmo": Family(
        partial(save_olmo_model, layer_types=[LINEAR, FULL, LINEAR, FULL]), 26, cpu_olmo_recurrence.apply
    ),
    "kimi": Family(
        partial(save_kimi_model, layer_types=[LINEAR, FULL, LINEAR, FULL]),
        26,
        cpu_kimi_recurrence.apply,
        stock=CPU_MLA,
    ),
    "bailing": Family(
        partial(save_bailing_model, groups=2, output_gate="head_wise"),
        26,
        cpu_kimi_recurrence.apply,
        stock=CPU_MLA,
    ),
    "lightning": Family(
        partial(save_ring_model, layers=4),
        26,
        cpu_bailing_recurrence.apply,
        stock=CPU_MLA,
        args={"enable_prefix_caching": False},
    ),
    "ring-linear": Family(partial(save_ring_model, layers=4, kv_heads=2), 26, cpu_bailing_recurrence.apply),
    "delta-net": Family(partial(save_fla_model, dtype=torch.float32), 26),
    "retnet": Family(partial(save_fla_model, kind="retnet", dtype=torch.float32), 26),
    "gla": Family(partial(save_fla_model, kind="gla", dtype=torch.float32), 26),
    "delta-net-alone": Family(partial(save_fla_model, group=None, dtype=torch.float32), 26, grows=False),
    "mamba1": Family(partial(save_mamba1_model, name="Jamba"), 26, cpu_mamba1.apply),
    "mamba1-alone": Family(partial(save_mamba1_model, name="Mamba"), 26, cpu_mamba1.apply, grows=False),
    "windows": Family(partial(save_windowed_model, window=40, layer_types=[SLIDING, FULL, SLIDING]), 32),
    # Blocks of 16 tokens, and not of 128.
    "latents": Family(partial(save_mla_model, q_lora=True), 256, stock=CPU_MLA | STOCK),
    "shared-kv": Family(partial(save_shared_kv_model, name="Gemma3nText", window=40), 32),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    folder = tmp_path_factory.mktemp("family") / "model"
    run_apart(family.save, folder, log=engine_logs / "models.log")
    return folder


def test_preempted_and_evicted(start_engine: EngineFactory, family: Family, model: Path) -> None:
    asks = mixed_asks(seed=3)
    float32 = {"dtype": "float32"} | family.args
    args = tight_args() | {"num_gpu_blocks_override": family.blocks} | float32
    with start_engine(model, hypic=False, mended=family.mended, **args, **family.stock) as engine:
        stock = measure(engine, [ask.plain() for ask in asks])
    with start_engine(model, **float32) as engine:
        units = engine.call(pool_unit_bytes)
    with start_engine(model, options=tight_options(units), **args) as engine:
        ours, counted = measure(engine, asks), engine.call(metrics)
        left = engine.call(audit)
    assert (counted["vllm:num_preemptions"] > 0) == family.grows and counted["vllm:hypic_evictions"] > 0
    assert counted["vllm:hypic_segments_hit"] > 0 and left.clean
    assert ours.first_max <= NOISE_FACTOR * stock.first_max + MAX_FLOOR, (ours, stock)


def test_records_come_back_from_disk(
    start_engine: EngineFactory, family: Family, model: Path, tmp_path: Path
) -> None:
    """Bit for bit, and without another prefill."""
    disk = {"type": "disk", "path": str(tmp_path / "records"), "bytes": "64MiB"}
    options = {"store": {"tiers": [disk]}}
    with start_engine(model, options=options, **family.args) as first:
        (cold,) = first.ask(COMPOSED)
        assert first.call(drained)
    with start_engine(model, options=options, **family.args) as second:
        (warm,) = second.ask(COMPOSED)
        assert second.call(hits) == 4
    assert same(warm, cold)


def test_records_of_another_instance(start_engine: EngineFactory, family: Family, model: Path) -> None:
    """They leave, at once and by copies as on a device, and land: nothing is computed."""
    here, events = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = {"segment_parallel": {"listen": here, "events": events}}
    with start_engine(model, options=options, **family.args) as engine:
        records = test_transfer.pushed(engine)
        with staged(engine):
            assert test_transfer.pushed(engine) == records
        (cold,) = engine.ask(test_transfer.ask())
        engine.call(test_transfer.forget)
        before, keys = engine.call(test_transfer.computed), [*engine.call(test_transfer.names).values()]
        with (
            closing(Sender(engine.call(test_transfer.namespace), None)) as sender,
            test_transfer.waiting(engine, test_transfer.ask(hypic_remote=keys)) as answers,
        ):
            sent = test_transfer.push(sender, here, records)
            (remote,) = answers.result(test_transfer.BOUND_S)
        assert all(one.delivered for one in sent), sent
        assert same(remote, cold) and engine.call(test_transfer.computed) == before


def drained(llm: Any) -> bool:
    done: bool = store_of(llm).drain(30)
    return done


def hits(llm: Any) -> int:
    found: int = store_of(llm).stats().tiers["disk"].hits
    return found
