"""Random checkpoints of Bailing V3 (Ling 3), weights under the names that vLLM's loader knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_checkpoints import (
    Shape,
    bailing_fields,
    bailing_layer,
    latent_attention,
    latent_fields,
    model_shapes,
    save_checkpoint,
    silence,
)
from benchmarks.lib.random_kimi import TAPS, delta_attention
from benchmarks.lib.random_models import SPECIAL_IDS


def save_bailing_model(
    path: str | Path,
    *,
    groups: int = 1,
    group_size: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    head_dim: int = 32,
    query_rank: int | None = None,
    output_gate: str | None = None,
    gate_bound: float | None = -5.0,
    experts: int = 0,
    silent: bool = False,
    vocab: int = 512,
    max_positions: int = 32768,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random Bailing V3 of `groups` groups of layers, of which the last one each has attention.

    `query_rank`: queries come by way of so many channels; `output_gate`: of attention, `head_wise` or
    `element_wise`; `gate_bound`: log decays are this times a sigmoid; `experts`: in every layer but the
    first, two chosen of so many, in two of four groups, beside a shared one; `silent`: attention layers add
    nothing.
    """
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "gated_attention_proj_granularity_type": output_gate,
        "rope_theta": 10000.0,
        "no_kda_lora": True,
        "kda_safe_gate": gate_bound is not None,
        "kda_lower_bound": gate_bound,
        "short_conv_kernel_size": TAPS,
        "num_experts": experts,
        "first_k_dense_replace": 1 if experts else groups * group_size,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        **bailing_fields(groups * group_size, group_size, head_dim),
        **latent_fields(head_dim, query_rank),
        **SPECIAL_IDS,
    }
    if experts:
        config |= {"num_experts_per_tok": 2, "num_shared_experts": 1, "n_group": 4, "topk_group": 2}
        config |= {"moe_intermediate_size": intermediate // 4, "routed_scaling_factor": 2.0}
        config |= {"moe_shared_expert_intermediate_size": intermediate // 4}
    attention = [i for i in range(groups * group_size) if (i + 1) % group_size == 0]
    layers = [_layer(config, index in attention, index) for index in range(groups * group_size)]
    folder = save_checkpoint(path, config, model_shapes(config, "word_embeddings", layers), dtype, seed)
    if silent:
        silence(folder, [f"model.layers.{i}.attention.dense" for i in attention])
    return folder


def _layer(config: dict[str, Any], attends: bool, index: int) -> dict[str, Shape]:
    """Shapes of a layer's weights."""
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    if attends:
        attention = latent_attention(config) | {"dense": (hidden, heads * size)}
        if gate := config["gated_attention_proj_granularity_type"]:
            attention |= {"g_proj": (heads if gate == "head_wise" else heads * size, hidden)}
    else:
        attention = delta_attention(hidden, heads, size)
        attention |= {f"{gate}_proj": (heads * size, hidden) for gate in "fg"}
    return bailing_layer(config, index, attention)
