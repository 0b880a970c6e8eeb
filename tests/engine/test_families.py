"""Model families: linear layers of every shape that the engine runs, and what is refused at start-up.

Behind one linear layer composing is exact by the affine law: inputs of every token depend on embeddings
and the conv context alone, and a seam of conv width covers the context. So ordinary requests of the same
engine are the yardstick, up to the rounding of bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_segments

from vllm_hypic.harness.sizes import random_model

from . import tiny_models, tiny_vision
from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, prompt, run_apart

BOUND = 0.15
"""On logprobs of the whole vocabulary; measured: below 0.08, and above 2.3 when T is left out."""

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([40, 150, 70, 333, 21], vocab=480)
COMPOSED = Ask(prompt(FIRST, SECOND, THIRD, lead=LEAD, query=QUERY))


@dataclass(frozen=True)
class Family:
    """An architecture with one linear layer, and full attention behind it that adds nothing."""

    name: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def heads(keys: int, values: int, size: int) -> dict[str, Any]:
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

FAMILIES = [
    Family("qwen3-next-64-grouped", "Qwen3Next", heads(2, 4, 64) | MOE),
    Family("qwen3-next-128-grouped", "Qwen3Next", heads(1, 4, 128) | MOE | {"mlp_only_layers": [0]}),
    Family("qwen3.5-moe-64", "Qwen3_5MoeText", heads(2, 2, 64) | MOE),
    # A vision-language model asked about text: MRotaryEmbedding, positions [3, tokens].
    Family(
        "qwen3.5-vision",
        "Qwen3_5",
        heads(2, 4, 64)
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            }
        },
    ),
    Family("qwen3.5-moe-128-grouped", "Qwen3_5MoeText", heads(2, 4, 128) | MOE),
]


ONE_LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def engine(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    tmp_path_factory: pytest.TempPathFactory,
    engine_logs: Path,
) -> Any:
    chosen: Family = request.param
    path = tmp_path_factory.mktemp(chosen.name)
    fields = ONE_LINEAR | chosen.fields
    quiet: dict[str, Any] = {"norm_center": 0.0, "silent": ("layers.1.self_attn.o_proj",)}
    if chosen.model == "Qwen3_5":
        save = partial(tiny_vision.save_vision, **quiet)
    else:
        save = partial(tiny_models.save, dtype=torch.bfloat16, **quiet)
    run_apart(save, path, chosen.model, fields, log=engine_logs / "models.log")
    with module_engine(path, max_logprobs=-1, enable_prefix_caching=False) as started:
        yield started


def first_token(engine: Engine, ask: Ask) -> torch.Tensor:
    """Logprobs of the whole vocabulary."""
    (answer,) = engine.ask(replace(ask, max_tokens=1, sampling={"logprobs": -1}))
    return torch.tensor([answer.first[i] for i in range(512)])


@pytest.mark.fast("qwen3-next-64-grouped", "qwen3.5-vision")
def test_one_linear_layer_is_full_recompute(engine: Engine) -> None:
    plain = first_token(engine, COMPOSED.plain())

    def error(**extra: Any) -> float:
        return float((first_token(engine, replace(COMPOSED, extra=extra)) - plain).abs().max())

    for seam in (3, 8, 20):
        assert error(hypic_seam_tokens=seam) <= BOUND, seam
    assert error(hypic_link="naive") > 6 * BOUND, "leaving T out goes unseen"


@pytest.mark.fast("qwen3-next-64-grouped", "qwen3.5-vision")
def test_cold_and_warm_are_bit_identical(engine: Engine) -> None:
    engine.reset()
    cold, warm = engine.ask_one_by_one(COMPOSED, COMPOSED)
    assert warm.cached > cold.cached == 0
    assert cold.samples == warm.samples
    assert cold.logprobs == warm.logprobs


def test_without_full_attention(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    """Records of a model of linear layers alone are states: there are no pages to wait for."""
    fields = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]} | heads(2, 4, 64) | MOE
    save = partial(tiny_models.save, dtype=torch.bfloat16, norm_center=0.0)
    run_apart(save, tmp_path, "Qwen3Next", fields, log=engine_logs / "models.log")
    with start_engine(tmp_path, max_logprobs=-1, enable_prefix_caching=False) as engine:
        ours, plain = (first_token(engine, ask) for ask in (COMPOSED, COMPOSED.plain()))
    assert float((ours - plain).abs().max()) <= BOUND


# -- windows and sinks ---------------------------------------------------------------------------------

NO_HYBRID = {"disable_hybrid_kv_cache_manager": True}
MIXED = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED_BOUND = 0.25
"""Two units of bfloat16 of these models' logits, which reach 30; measured: 0.17."""
WINDOWED = [
    pytest.param("Mistral", {"sliding_window": 64}, {}, id="mistral"),
    # Layers with a window have another rotary base.
    pytest.param("Gemma3Text", MIXED, {}, id="gemma3"),
    pytest.param("Gemma3Text", MIXED, NO_HYBRID, id="gemma3-one-group"),
    pytest.param("GptOss", MIXED | EXPERTS, {}, id="gpt-oss"),
]


@pytest.mark.parametrize(("model", "fields", "args"), WINDOWED)
@pytest.mark.fast("mistral", "gpt-oss")
def test_windowed_families(
    model: str,
    fields: dict[str, Any],
    args: dict[str, Any],
    start_engine: EngineFactory,
    tmp_path: Path,
    engine_logs: Path,
) -> None:
    """A record of the leading segment is exact whatever layers see of it; records of others are bit for bit
    what they were, cold and warm."""
    save = partial(tiny_models.save, dtype=torch.bfloat16)
    run_apart(save, tmp_path, model, {"num_hidden_layers": 2} | fields, log=engine_logs / "models.log")
    options = {"context": "none", "islands": "none"}
    with start_engine(
        tmp_path, max_logprobs=-1, enable_prefix_caching=False, options=options, **args
    ) as engine:
        lead = Ask(prompt(lead=THIRD, query=QUERY))
        plain = first_token(engine, lead.plain())
        assert float((first_token(engine, lead) - plain).abs().max()) <= WINDOWED_BOUND
        shorter = Ask(prompt(lead=THIRD[:-1], query=QUERY))
        assert float((first_token(engine, shorter) - plain).abs().max()) > WINDOWED_BOUND
        engine.reset()
        cold, warm = engine.ask_one_by_one(COMPOSED, COMPOSED)
        assert warm.cached > cold.cached == 0
        assert cold.samples == warm.samples and cold.logprobs == warm.logprobs


# -- refusals ----------------------------------------------------------------------------------------


def test_alibi_is_refused(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    save = partial(tiny_models.save, dtype=torch.bfloat16)
    fields = {"num_hidden_layers": 2, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True}
    run_apart(save, tmp_path, "Bloom", fields, log=engine_logs / "models.log")
    with pytest.raises(EngineError, match=r"hypic: .*h\.0\.self_attention\.attn: ALiBi") as error:
        start_engine(tmp_path)
    assert error.value.kind in ("Unsupported", "ConfigError")


@pytest.mark.slow
def test_gated_delta_layers_in_float32_are_refused(start_engine: EngineFactory) -> None:
    """Stock vLLM's own code would end the engine at the first plain request."""
    with pytest.raises(EngineError, match=r"linear_attn: torch.float32 .* choose another --dtype"):
        start_engine(random_model("tiny"), dtype="float32")
