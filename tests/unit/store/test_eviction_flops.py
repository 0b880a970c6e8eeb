"""Estimated FLOPs of a prefill against the models' own layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vllm_hypic.store.eviction.flops import FlopModel

SMALL: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 48, "intermediate_size": 224},
}
LATENT: dict[str, Any] = {
    **{"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 224},
    **{"kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
    **{"first_k_dense_replace": 2, "vocab_size": 128},
}
TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layer_types": TYPES, "pad_token_id": 0, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 16},
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 6},
}
EXPERTS = {
    **{"moe_intermediate_size": 80, "shared_expert_intermediate_size": 72},
    **{"num_experts": 8, "num_experts_per_tok": 3},
}
MAMBA2 = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 24}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}


def made(name: str, device: str = "cpu", **fields: Any) -> tuple[Any, nn.Module]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**fields)
    with torch.device(device):
        return config, transformers.AutoModel.from_config(config, attn_implementation="eager")


def run(model: nn.Module, tokens: int) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    return counter.get_total_flops()


def test_a_dense_prefill_is_what_its_model_runs() -> None:
    """A counter sees every pair of tokens; those behind the query are masked out."""
    config, model = made("Qwen3", **SMALL, num_hidden_layers=2)
    found, masked = FlopModel.from_hf_config(config, 2, 0), 2 * 4 * 4 * 48 * 40 * 39 / 2
    assert found.prefill(40) == pytest.approx(run(model, 40) - masked, rel=1e-3)


def test_pairs_of_latent_attention_are_what_its_model_runs() -> None:
    config, model = made("DeepseekV2", **LATENT)
    found = FlopModel.from_hf_config(config, 2, 0)
    quadratic = run(model, 80) - 2 * run(model, 40)  # the linear part is gone
    assert found.per_pair * (80**2 - 2 * 40**2) == pytest.approx(quadratic, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "attention", "linear", "fields"),
    [
        ("Qwen3_5Text", 1, 3, DELTA),
        ("OlmoHybrid", 1, 3, DELTA),
        ("Qwen3_5MoeText", 1, 3, DELTA | EXPERTS),
        ("Bamba", 1, 1, MAMBA2 | {"mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}),
        ("Lfm2", 1, 2, CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}),
    ],
)
def test_a_hybrids_tokens_cost_about_its_weights(
    name: str, attention: int, linear: int, fields: dict[str, Any]
) -> None:
    config, model = made(name, "meta", **(SMALL | fields))
    active = fields.get("num_experts_per_tok", 0) / fields.get("num_experts", 1)
    weights = sum(
        p.numel() * (active if p.dim() == 3 and "experts" in n else 1)
        for n, p in model.layers.named_parameters()
        if p.dim() > 1
    )
    found = FlopModel.from_hf_config(config, attention, linear)
    assert found.per_token == pytest.approx(2 * weights, rel=0.35)


def test_prefill_is_linear_plus_quadratic() -> None:
    flops = FlopModel(100.0, 6.0)
    assert (flops.prefill(0), flops.prefill(1), flops.prefill(10)) == (0, 106, 1000 + 6 * 55)


def test_a_head_size_that_differs_between_layers_is_missing() -> None:
    """Transformers raises where it is asked of Gemma 4."""
    import transformers

    config = transformers.Gemma4TextConfig(hidden_size=96, num_attention_heads=4, num_hidden_layers=6)
    with pytest.raises(RuntimeError, match="per-layer"):
        config.head_dim  # noqa: B018
    assert FlopModel.from_hf_config(config, 6, 0).per_pair == 2 * 6 * 4 * (24 + 24)


def test_missing_fields_fall_back_as_documented() -> None:
    nothing = FlopModel.from_hf_config(SimpleNamespace(), 1, 1)
    attention, linear, mlp = 4096 * 64 * 256, 5 * 4096**2, 3 * 4096 * 4 * 4096
    assert nothing == FlopModel(2.0 * (attention + linear + 2 * mlp), 2.0 * 32 * 256)
    odd = SimpleNamespace(hidden_size=256, num_attention_heads=None, head_dim="auto", intermediate_size=0)
    assert FlopModel.from_hf_config(odd, 1, 0) == FlopModel(
        2.0 * (256 * 4 * 256 + 3 * 256 * 1024), 2.0 * 2 * 256
    )
