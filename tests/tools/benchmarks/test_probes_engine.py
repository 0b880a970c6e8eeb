"""Probes on real engines: planted differences must show, and noise must not look like one."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from commands import measured
from engine.engines import FIRST_WORD, LAST_WORD, SEP, Engine, run_apart
from lib.oracle import Oracle
from lib.oracle.models import save_hybrid_model

from benchmarks.answers.methods import link_method, noise_name
from benchmarks.lib.stats import relative
from benchmarks.probes import attention, drift, dtype, length
from benchmarks.probes.engine_calls import layers
from benchmarks.probes.engine_pair import EnginePair, Probe
from benchmarks.probes.truth import refusal, true_state
from vllm_hypic.harness.settings import EngineSettings

pytestmark = pytest.mark.engine
METHODS = ("naive-8", "block", "epic-16", "hypic-8")
SEGMENTS, TOKENS = 3, 96


class Named(Engine):
    """An engine of the engine tests that also tells the separator and the words of its model."""

    name = "engine"
    described: ClassVar[dict[str, Any]] = {"compiled": False}
    separator = SEP
    vocabulary = range(FIRST_WORD, LAST_WORD + 1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def model(logs: Path) -> Path:
    """Four layers, linear and full attention in turn, random with live gates."""
    return run_apart(partial(save_hybrid_model, tie=False), logs / "model", log=logs / "model.log")


@pytest.fixture(scope="module")
def pair(logs: Path, model: Path) -> Iterator[EnginePair]:
    """Engines as ``running_pair`` makes them, from engines that start sooner."""
    settings = EngineSettings(model, threads=1)
    probe = Probe(settings, tuple(map(link_method, METHODS)), prompts=2, seed=0, noise_chunk=100)
    options = {"enable_prefix_caching": False, "max_num_seqs": 4}
    with (
        Named(model, logs / "engine.log", **options) as engine,
        Named(model, logs / "noise.log", max_num_batched_tokens=probe.noise_chunk, **options) as noise,
    ):
        yield EnginePair(probe, engine, noise, engine.call(layers))


def test_drift_tells_a_missing_transition_from_noise(pair: EnginePair) -> None:
    found = drift.measure(pair, SEGMENTS, TOKENS, truth=True)
    full, noise = found.row(drift.FULL_NAME), found.row(noise_name(pair.probe.noise_chunk))
    naive, hypic = found.row("naive-8"), found.row("hypic-8")
    assert full.truth is not None and hypic.truth is not None and naive.truth is not None
    # First layer: reuse is as near to the truth as full recompute; without T it is nowhere near.
    assert hypic.truth.value <= 1.5 * full.truth.value
    assert naive.truth.value > 50 * hypic.truth.value
    assert 0 < noise.states[0].value <= 2 * full.truth.value
    # Deeper layers: inputs of interiors are approximate, so the drift must stand out of the noise.
    assert hypic.states[-1].value > 5 * noise.states[-1].value
    assert len(hypic.states) == 2 and len(hypic.hidden) == 4
    assert full.computed.value == noise.computed.value == 64 + SEGMENTS * TOKENS + 32
    assert hypic.computed.value == SEGMENTS * 16 + 32


def test_the_true_state_is_the_oracles(pair: EnginePair, model: Path) -> None:
    """The oracle reads the checkpoint, the probe what vLLM made of it."""
    assert pair.engine.call(refusal) is None
    [prompt, _] = pair.prompts(SEGMENTS, TOKENS)
    expected = next(s.S for s in Oracle(model).full_state(prompt.plain()) if s is not None)
    assert relative(pair.engine.call(true_state, prompt.plain()), np.asarray(expected)) < 1e-9


def test_attention_finds_deviations_at_heads_and_none_in_seams(pair: EnginePair) -> None:
    found = attention.measure(pair, SEGMENTS, TOKENS)
    layer = pair.layers.attention[0]
    noise, block = found.row(noise_name(pair.probe.noise_chunk), layer), found.row("block", layer)
    epic, hypic = found.row("epic-16", layer), found.row("hypic-8", layer)
    seam = found.zones.index("4-7")
    for part in ("key", "value"):
        alone, floor = getattr(block, part), getattr(noise, part)
        # Of a segment prefilled alone, the head deviates most, the tail least: it has seen most of it.
        assert alone.head[0].value > 2 * alone.middle.value > 2 * alone.tail[0].value
        assert alone.tail[0].value > 5 * floor.tail[0].value
        # Recomputed tokens of a first attention layer have exact inputs: nothing but noise is left.
        for method, ends in ((epic, ("head",)), (hypic, ("head", "tail"))):
            for end in ends:
                assert getattr(getattr(method, part), end)[seam].value < 4 * getattr(floor, end)[seam].value
        # What is not recomputed stays as it was.
        assert getattr(epic, part).tail[seam].value == pytest.approx(alone.tail[seam].value, rel=0.01)
    assert noise.seen.value < epic.seen.value < block.seen.value
    assert found.weights[layer].middle.value == pytest.approx(1, abs=0.5)


def test_dtypes_are_told_apart_below_the_noise(pair: EnginePair) -> None:
    found = {r.name: r for r in dtype.measure(pair, SEGMENTS, TOKENS, 8)}
    exact = (found[f"exact, T {dtype}, S float32"] for dtype in ("float32", "float16", "bfloat16"))
    fp32, fp16, bf16 = (row.error.value for row in exact)
    assert fp32 < 1e-7 and 4 * fp16 < bf16
    assert 10 * fp32 < fp16 < 2e-4
    records = found["engine's records, T float16, S float32"]
    assert fp16 < records.error.value < 2 * found["engine, full recompute"].error.value
    assert records.record_bytes == found["exact, T float16, S float32"].record_bytes


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (drift, ["--segments", "2", "--tokens", "96", "--methods", "block,hypic-8"]),
        (attention, ["--segments", "2", "--tokens", "96", "--methods", "block,hypic-8"]),
        (length, ["--segments", "2,3", "--tokens", "64", "--lengths", "64,96", "--methods", "block"]),
        (dtype, ["--segments", "2", "--tokens", "96", "--seam", "4"]),
    ],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else "",
)
@pytest.mark.fast("drift-")
def test_commands_write_what_they_show(
    pair: EnginePair,
    model: Path,
    module: ModuleType,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "running_pair", lambda probe, shapes: nullcontext(replace(pair, probe=probe)))
    name = module.__name__.rpartition(".")[2]
    output, report = measured(tmp_path, "probes", name, "--model", model, "--prompts", 1, *arguments)
    assert report["benchmark"] == f"probe {name}"
    assert report["command"].startswith("python -m benchmarks.probes")
    assert report["settings"]["probe"]["prompts"] == 1
    rows = {
        drift: lambda r: [row["method"] for row in r["drift"]["rows"]],
        attention: lambda r: [row["method"] for row in r["attention"]["rows"]][::2],
        length: lambda r: [row["method"] for row in r["lengths"][1]["rows"]],
        dtype: lambda r: [row["name"] for row in r["dtype"]],
    }[module](report["results"])
    assert noise_name(200) in rows
    for row in rows:
        assert row.split(",")[0] in " ".join(output.split()), row
