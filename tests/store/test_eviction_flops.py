"""FLOPs of a prefill against the models' own layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle.bailing_models import save_bailing_model
from oracle.fla_models import save_fla_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from vllm_hypic import models
from vllm_hypic.harness.random_kimi import save_kimi_model
from vllm_hypic.harness.random_ring import save_ring_model
from vllm_hypic.store.eviction.flops import (
    Attention,
    Experts,
    FlaMixer,
    FlopModel,
    GatedDelta,
    KimiDelta,
    Latent,
    Lightning,
    Mamba1,
    Mamba2,
    Mlp,
    ShortConv,
    UnknownLinear,
)

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
}
LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
}
TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]


def products(layers: nn.Module) -> float:
    """FLOPs a token of everything that multiplies it with a weight; of stacked experts, all of them."""
    total = 0.0
    for module in layers.modules():
        for weight in module.parameters(recurse=False):
            if isinstance(module, (nn.Linear, nn.Conv1d)) and weight.dim() > 1:
                total += 2 * weight.numel()
    return total


def meta(name: str, **fields: Any) -> tuple[Any, nn.Module]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL, **fields)
    with torch.device("meta"):
        return config, transformers.AutoModel.from_config(config)


def test_gdn_and_gated_attention_are_those_of_qwen3_5():
    config, model = meta(
        "Qwen3_5Text", intermediate_size=224, num_hidden_layers=4, layer_types=TYPES, **LINEAR
    )
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert isinstance(flops.linear, GatedDelta) and flops.attention.gated
    states = 3 * 7 * 6 * 32 * 16
    assert flops.per_token == pytest.approx(products(model.layers) + states, rel=1e-9)


def test_olmo_hybrid_has_that_layer_beside_attention_without_a_gate():
    fields: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": TYPES, "pad_token_id": 0}
    config, model = meta("OlmoHybrid", intermediate_size=224, **fields, **LINEAR)
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert isinstance(flops.linear, GatedDelta) and not flops.attention.gated
    states = 3 * 7 * 6 * 32 * 16
    assert flops.per_token == pytest.approx(products(model.layers) + states, rel=1e-9)


def save_kimi(path: Path) -> Path:
    fields: dict[str, Any] = {"linear_heads": 3, "linear_head_dim": 32, "layer_types": TYPES}
    return save_kimi_model(path, hidden=96, intermediate=224, vocab=64, **fields)


def save_bailing(path: Path, output_gate: str | None) -> Path:
    fields: dict[str, Any] = {"heads": 3, "head_dim": 32, "group_size": 4, "query_rank": 40}
    return save_bailing_model(path, hidden=96, intermediate=224, vocab=64, output_gate=output_gate, **fields)


@pytest.mark.parametrize(
    "save",
    [save_kimi, *(partial(save_bailing, output_gate=gate) for gate in (None, "head_wise", "element_wise"))],
    ids=["kimi", "bailing", "gate-a-head", "gate-a-channel"],
)
def test_kimi_delta_attention(tmp_path: Path, save: Callable[[Path], Path]):
    folder = save(tmp_path)
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert isinstance(flops.linear, KimiDelta) and isinstance(flops.attention, Latent)
    weights = load_file(folder / "model.safetensors")
    used = [w for name, w in weights.items() if "layers." in name and (w.dim() == 2 or "conv1d" in name)]
    assert flops.per_token == pytest.approx(2 * sum(w.numel() for w in used) + 3 * 7 * 3 * 32 * 32, rel=1e-9)


@pytest.mark.parametrize(("kv_heads", "kind"), [(None, Latent), (1, Attention)], ids=["latent", "grouped"])
@pytest.mark.parametrize("experts", [0, 8])
def test_lightning_attention(tmp_path: Path, experts: int, kv_heads: int | None, kind: type[object]):
    fields: dict[str, Any] = {"hidden": 96, "intermediate": 224, "heads": 3, "head_dim": 32, "query_rank": 24}
    fields |= {"experts": experts, "kv_heads": kv_heads}
    folder = save_ring_model(tmp_path, layers=4, group=4, vocab=64, **fields)
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert isinstance(flops.linear, Lightning) and isinstance(flops.attention, kind)
    if experts:
        assert flops.mlp == Experts(total=8, active=2, intermediate=56, shared_intermediate=56)
        return
    weights = load_file(folder / "model.safetensors")
    used = [w for name, w in weights.items() if "layers." in name and w.dim() == 2]
    assert flops.per_token == pytest.approx(2 * sum(w.numel() for w in used) + 3 * 5 * 3 * 32 * 32, rel=1e-9)


FLA = [
    ({"kind": "delta_net", "expand_v": 2.0, "use_gate": True}, 6),
    ({"kind": "delta_net", "use_short_conv": False}, 6),
    ({"kind": "retnet", "expand_v": 2.0}, 5),
    ({"kind": "gla", "expand_k": 0.5, "use_output_gate": False}, 5),
]
"""Fields of a model, and operations on an entry of its state."""


@pytest.mark.parametrize(("fields", "update"), FLA)
def test_models_of_flash_linear_attention(tmp_path: Path, fields: dict[str, Any], update: int):
    folder = save_fla_model(tmp_path, layers=4, group=4, hidden=96, heads=3, vocab=64, **fields)
    models.register()
    config = AutoConfig.from_pretrained(folder)
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert isinstance(flops.linear, FlaMixer) and not flops.attention.gated
    weights = load_file(folder / "model.safetensors")
    used = [w for name, w in weights.items() if "layers." in name and (w.dim() == 2 or "conv1d" in name)]
    state = config.key_dim * config.value_dim // 3
    assert flops.per_token == pytest.approx(2 * sum(w.numel() for w in used) + 3 * update * state, rel=1e-9)


def test_experts_are_those_of_qwen3_5_moe():
    config, model = meta(
        "Qwen3_5MoeText",
        num_hidden_layers=4,
        layer_types=TYPES,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        num_experts=8,
        num_experts_per_tok=3,
        **LINEAR,
    )
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=3)
    assert flops.mlp == Experts(total=8, active=3, intermediate=40, shared_intermediate=72)
    stacked = [p for name, p in model.layers.named_parameters() if "experts" in name and p.dim() == 3]
    active = 2 * sum(p.numel() for p in stacked) * 3 / 8
    routers = 2 * sum(
        p.numel() for name, p in model.layers.named_parameters() if name.endswith("mlp.gate.weight")
    )
    expected = products(model.layers) + active + routers + 3 * 7 * 6 * 32 * 16
    assert routers > 0 and flops.per_token == pytest.approx(expected, rel=1e-9)


def test_mamba2_is_that_of_bamba():
    config, model = meta(
        "Bamba",
        intermediate_size=224,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=24,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_expand=2,
    )
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=1)
    assert flops.linear == Mamba2(heads=8, head_size=24, state_size=16, groups=2, conv_width=4)
    [attention] = [layer.self_attn for layer in model.layers if hasattr(layer, "self_attn")]
    assert attention.head_dim == 48 and not flops.attention.gated
    assert flops.per_token == pytest.approx(products(model.layers) + 5 * 8 * 24 * 16, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NemotronH", {"mamba_num_heads": 8, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2}),
        (
            "GraniteMoeHybrid",
            {"mamba_n_heads": 8, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_n_groups": 2},
        ),
        ("FalconH1", {"mamba_d_ssm": 192, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}),
        ("Zamba2", {"n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2}),
    ],
)
def test_every_model_of_mamba2_calls_its_sizes_otherwise(name: str, fields: dict[str, Any]):
    import transformers

    config = getattr(transformers, f"{name}Config")(hidden_size=96, num_attention_heads=4, **fields)
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=1)
    assert flops.linear == Mamba2(heads=8, head_size=24, state_size=16, groups=2, conv_width=4)


def test_mamba1_is_that_of_mamba():
    config, model = meta("Mamba", num_hidden_layers=2, state_size=8, time_step_rank=5, conv_kernel=3)
    flops = FlopModel.from_hf_config(config, attention_layers=0, linear_layers=2)
    assert flops.linear == Mamba1(inner=192, state_size=8, step_rank=5, conv_width=3)
    assert flops.per_token == pytest.approx(products(model.layers) + 2 * 5 * 192 * 8, rel=1e-9)


def test_jamba_calls_the_sizes_of_mamba1_otherwise():
    from transformers import JambaConfig

    config = JambaConfig(hidden_size=96, mamba_d_state=8, mamba_dt_rank=5, mamba_d_conv=3)
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=7)
    assert flops.linear == Mamba1(inner=192, state_size=8, step_rank=5, conv_width=3)


def test_short_convolutions_are_those_of_lfm2():
    config, model = meta(
        "Lfm2",
        intermediate_size=224,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=3,
        layer_types=["conv", "conv", "full_attention"],
    )
    flops = FlopModel.from_hf_config(config, attention_layers=1, linear_layers=2)
    assert flops.linear == ShortConv(width=3)
    gates = 2 * 2 * config.hidden_size
    assert flops.per_token == pytest.approx(products(model.layers) + gates, rel=1e-9)


def test_attention_counts_causal_pairs_only():
    """A counter of what a dense model really runs sees every pair: the other half is masked out."""
    import transformers

    config = transformers.Qwen3Config(**SMALL, intermediate_size=224, num_hidden_layers=2)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    flops = FlopModel.from_hf_config(config, attention_layers=2, linear_layers=0)
    tokens, counter = 40, FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    masked = 2 * 4 * 4 * 48 * tokens * (tokens - 1) / 2
    assert flops.prefill(tokens) == pytest.approx(counter.get_total_flops() - masked, rel=1e-3)


@pytest.mark.parametrize("query_rank", [None, 24])
def test_latent_attention_is_that_of_a_real_layer(query_rank: int | None) -> None:
    """Every product that a dense DeepSeek-V2 of two layers runs, but for masked pairs."""
    import transformers

    config = transformers.DeepseekV2Config(
        **{"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 224},
        **{"kv_lora_rank": 40, "q_lora_rank": query_rank, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 24, "first_k_dense_replace": 2, "vocab_size": 64},
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    flops = FlopModel.from_hf_config(config, attention_layers=2, linear_layers=0)
    flops = replace(flops, mlp=Mlp(224))  # the model's experts, of which these layers have none
    tokens, counter = 40, FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    masked = 2 * 2 * 4 * (16 + 8 + 24) * tokens * (tokens - 1) / 2
    assert flops.prefill(tokens) == pytest.approx(counter.get_total_flops() - masked, rel=1e-3)


def test_prefill_is_linear_plus_quadratic():
    flops = FlopModel(64, 2, 6, Attention(4, 2, 16), GatedDelta(2, 2, 16, 16), Mlp(128))
    assert flops.prefill(0) == 0
    assert flops.prefill(1) == flops.per_token + 2 * 4 * 4 * 16
    third = flops.prefill(300) - 3 * flops.prefill(100)
    assert third == pytest.approx(2 * 4 * 4 * 16 * (300 * 301 - 3 * 100 * 101) / 2)


def test_a_head_size_that_differs_between_layers_is_missing():
    """Transformers raises where it is asked of Gemma 4."""
    import transformers

    config = transformers.Gemma4TextConfig(hidden_size=96, num_attention_heads=4, num_hidden_layers=6)
    with pytest.raises(RuntimeError, match="per-layer"):
        config.head_dim  # noqa: B018
    assert FlopModel.from_hf_config(config, 6, 0).attention.head_size == 24


def test_missing_fields_fall_back_as_documented():
    nothing = FlopModel.from_hf_config(SimpleNamespace(), 1, 1)
    assert nothing.hidden == 4096
    assert nothing.attention == Attention(heads=32, kv_heads=32, head_size=128, gated=False)
    assert nothing.linear == UnknownLinear(128) and nothing.mlp == Mlp(4 * 4096)
    odd = SimpleNamespace(hidden_size=256, num_attention_heads=None, head_dim="auto", intermediate_size=0)
    some = FlopModel.from_hf_config(odd, 1, 0)
    assert some.attention == Attention(heads=2, kv_heads=2, head_size=128) and some.mlp == Mlp(1024)
    assert FlopModel.from_hf_config(SimpleNamespace(), 0, 2).prefill(10) > 0
