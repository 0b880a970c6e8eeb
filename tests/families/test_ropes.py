"""Every rotary embedding, exactly.

In a model of one layer K and V depend on token embeddings alone, so composing cached segments gives what
a full recompute gives, by any link method: the same engine's ordinary request is the yardstick, in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import tiny_models, tiny_vision
from engine.conftest import EngineFactory
from engine.engines import Engine

from .contract import COMPOSED, Models, first_token, largest

BOUND = 1e-4
"""On logprobs of the whole vocabulary; measured: below 1e-5, and above 0.3 with a planted fault."""
METHODS: list[dict[str, Any]] = [{}, {"hypic_link": "block"}, {"hypic_link": "epic-8"}]


@dataclass(frozen=True)
class Rope:
    """An architecture with the rotary embedding that vLLM should build and we should link."""

    name: str
    model: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def saved(self, models: Models) -> Any:
        # Qwen2VL is asked about text only.
        seeing = self.model == "Qwen2VL"
        save, key = (tiny_vision.save_vision, "text") if seeing else (tiny_models.save, "fields")
        fields = {"num_hidden_layers": 1} | self.fields
        return models(f"rope-{self.name}", partial(save, name=self.model, **{key: fields}))


def rope(rope_type: str = "default", **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **fields}}


NTK: dict[str, Any] = {"factor": 3.0, "max_trained_positions": 512}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 512
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 1024}
"""Its table is scaled by mscale 1.14, so K is too: rotating twice would scale twice."""
ROPES = [
    Rope("default", "Qwen3", "RotaryEmbedding", rope()),
    Rope("linear", "Llama", "LinearScalingRotaryEmbedding", rope("linear", factor=3.0)),
    Rope("dynamic-ntk", "Llama", "DynamicNTKScalingRotaryEmbedding", rope("dynamic", **NTK)),
    Rope("llama3", "Llama", "Llama3RotaryEmbedding", rope("llama3", **LLAMA3)),
    Rope("yarn", "Qwen3", "YaRNScalingRotaryEmbedding", rope("yarn", **YARN)),
    Rope("partial", "StableLm", "RotaryEmbedding", rope(partial_rotary_factor=0.25) | {"head_dim": None}),
    Rope("interleaved", "Cohere", "RotaryEmbedding", rope() | {"logit_scale": 1.0}),
    Rope("interleaved-partial", "Glm4", "RotaryEmbedding", rope(partial_rotary_factor=0.5)),
    Rope("mrope", "Qwen2VL", "MRotaryEmbedding", rope(mrope_section=[8, 12, 12]) | {"hidden_size": 256}),
    Rope("nope", "Granite", "NoPE", rope() | {"layer_rope_theta": [0], "attention_multiplier": 0.125}),
]


@pytest.fixture(scope="module", params=ROPES, ids=str)
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, models: Models
) -> Iterator[tuple[Engine, Rope]]:
    chosen: Rope = request.param
    args: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "disable_log_stats": False}
    with module_engine(chosen.saved(models), **args) as started:
        yield started, chosen


def attention_impls(llm: Any) -> dict[str, Any]:
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: layer.impl for name, layer in layers.items() if hasattr(layer, "impl")}


def linked(llm: Any) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Rope class, neox style and table shape of every attention layer."""
    found = []
    for impl in attention_impls(llm).values():
        table = impl.link.table()
        kind = "NoPE" if table is None else type(impl.link.rope).__name__.removeprefix("Hypic")
        found.append((kind, impl.link.neox, () if table is None else tuple(table.shape)))
    return found


def plant(llm: Any, change: Callable[[torch.Tensor, bool], tuple[torch.Tensor, bool]]) -> None:
    """Give the readers of public K another table or style."""
    for impl in attention_impls(llm).values():
        table, neox = change(impl.link.table(), impl.link.neox)
        wrong = SimpleNamespace(cos_sin_cache=table.contiguous(), is_neox_style=neox)
        impl.hypic_right = impl.link
        impl.link = replace(impl.link, rope=wrong)


def restore(llm: Any) -> None:
    for impl in attention_impls(llm).values():
        impl.link = impl.hypic_right


def one_position_late(table: torch.Tensor, neox: bool) -> tuple[torch.Tensor, bool]:
    return table.roll(1, 0), neox


def other_style(table: torch.Tensor, neox: bool) -> tuple[torch.Tensor, bool]:
    return table, not neox


def unscaled(table: torch.Tensor, neox: bool) -> tuple[torch.Tensor, bool]:
    cos, sin = table.chunk(2, -1)
    return table / (cos**2 + sin**2).sqrt().repeat(1, 2), neox


@pytest.mark.fast("interleaved-partial")
def test_composed_is_full_recompute(engine: tuple[Engine, Rope]) -> None:
    running, _ = engine
    plain = first_token(running, COMPOSED.plain())
    for extra in METHODS:
        found = largest(first_token(running, replace(COMPOSED, extra=extra)), plain)
        assert found <= BOUND, f"{extra or 'hypic'}: {found:.1e}"
    assert running.metrics()["vllm:hypic_tokens_reused"] > 0, "nothing came from the pool"


@pytest.mark.fast("interleaved-partial")
def test_link(engine: tuple[Engine, Rope]) -> None:
    running, chosen = engine
    ((kind, neox, shape),) = running.call(linked)
    assert kind == chosen.kind
    assert neox == (not chosen.name.startswith("interleaved"))
    size = 64 if chosen.model != "StableLm" else 32
    factor = chosen.fields["rope_parameters"].get("partial_rotary_factor", 1.0)
    assert shape == () if kind == "NoPE" else shape[1] == size * factor


@pytest.mark.parametrize("engine", [r for r in ROPES if r.kind != "NoPE"], ids=str, indirect=True)
@pytest.mark.fast("interleaved-partial")
def test_planted_faults_are_seen(engine: tuple[Engine, Rope]) -> None:
    """Were K rotated by a wrong table, the bound would be broken by a factor of a thousand."""
    running, chosen = engine
    plain, block = first_token(running, COMPOSED.plain()), replace(COMPOSED, extra={"hypic_link": "block"})
    for fault in (one_position_late, other_style, *[unscaled] * (chosen.name == "yarn")):
        running.call(plant, fault)
        try:
            found = largest(first_token(running, block), plain)
        finally:
            running.call(restore)
        assert found > 1000 * BOUND, f"{fault.__name__}: {found:.1e}"
