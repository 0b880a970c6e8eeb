"""Models and arguments that are refused when a real engine starts, by name."""

from functools import partial
from typing import Any

import pytest
import torch
from engine import tiny_models
from engine.conftest import EngineFactory
from engine.engines import EngineError

from benchmarks.lib.sizes import random_model

from .contract import Models
from .table import FAMILIES
from .test_ropes import rope

ONE_LATENT = {
    **{"num_hidden_layers": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 64, "num_key_value_heads": 4},
}
BLOOM = {"num_hidden_layers": 2, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True}
LONGROPE: dict[str, Any] = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
LONGROPE |= {"original_max_position_embeddings": 2048, "partial_rotary_factor": 1.0}
PHI3 = {"original_max_position_embeddings": 2048, "head_dim": 64, "hidden_size": 256, "num_hidden_layers": 1}
UNTAPPED = r"layers\.0\.self_attn\.attn rotates K by a rotary embedding that hypic cannot observe"
REFUSED = {
    "alibi": ("Bloom", BLOOM, r"h\.0\.self_attention\.attn: ALiBi"),
    "rank": ("DeepseekV2", ONE_LATENT | {"kv_lora_rank": 256}, "latent attention with rows of 320"),
    "indexer": ("DeepseekV32", ONE_LATENT, r"sparse attention \(an indexer"),
    "longrope": ("Phi3", rope("longrope", **LONGROPE) | PHI3, UNTAPPED),
    # vLLM runs it by transformers' own code, whose rotation is not a layer of vLLM.
    "transformers": ("SmolLM3", {"num_hidden_layers": 1}, UNTAPPED),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.fast("alibi", "rank", "indexer")
def test_refused(case: str, start_engine: EngineFactory, models: Models) -> None:
    name, fields, says = REFUSED[case]
    dtype = torch.bfloat16 if name == "Bloom" else torch.float32
    folder = models(f"refused-{name}", partial(tiny_models.save, name=name, fields=fields, dtype=dtype))
    latent = name.startswith("Deepseek")
    with pytest.raises(EngineError, match=rf"hypic: .*{says}") as error:
        start_engine(folder, **({"tokenizer_mode": "hf"} if latent else {}))
    assert latent or error.value.kind == "Unsupported"


def test_gated_delta_layers_in_float32(start_engine: EngineFactory) -> None:
    """Stock vLLM's own code would end the engine at the first plain request."""
    with pytest.raises(EngineError, match=r"linear_attn: torch.float32 .* use --dtype bfloat16"):
        start_engine(random_model("tiny"), dtype="float32")


@pytest.mark.parametrize("name", ["shared-kv", "shared-kv-gemma4"])
def test_fast_prefill_of_shared_kv(name: str, start_engine: EngineFactory, models: Models) -> None:
    with pytest.raises(EngineError, match="--kv-sharing-fast-prefill") as error:
        start_engine(models(name, FAMILIES[name].save), kv_sharing_fast_prefill=True)
    assert error.value.kind == "ConfigError"
