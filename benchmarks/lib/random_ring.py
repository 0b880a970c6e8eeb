"""Random checkpoints of Ring and Ling 2.5 (`BailingMoeV2_5ForCausalLM`) and of Ring-linear 2.0
(`BailingMoeLinearV2ForCausalLM`).  Layers have lightning attention; every `group`-th layer has latent
attention or grouped-query attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .random_checkpoints import (
    Shape,
    bailing_fields,
    bailing_layer,
    latent_attention,
    latent_fields,
    model_shapes,
    save_checkpoint,
    silence,
)
from .random_models import SPECIAL_IDS


def save_ring_model(
    path: str | Path,
    *,
    layers: int,
    group: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 32,
    query_rank: int | None = None,
    partial_rotary_factor: float = 0.5,
    rope_theta: float = 10000.0,
    yarn: float | None = None,
    norm_groups: int = 2,
    silu: bool = False,
    experts: int = 0,
    expert_groups: int = 1,
    silent: bool = False,
    vocab: int = 512,
    max_positions: int = 32768,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random model.

    `kv_heads`: KV heads of grouped-query attention, as in Ring-linear 2.0; `None` for latent attention;
    `partial_rotary_factor`: for heads of linear layers and of grouped-query attention; `yarn`: factor that
    stretches positions; `norm_groups`: groups of channels in which outputs of linear layers are normed;
    `silu`: whether q, k and v of linear layers have a SiLU; `experts`: number of experts in every layer but
    the first, of which two are chosen, in half of `expert_groups`, beside a shared expert; `silent`:
    attention of non-linear layers adds nothing.
    """
    latent = kv_heads is None
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV2_5ForCausalLM" if latent else "BailingMoeLinearV2ForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else kv_heads,
        "rope_theta": rope_theta,
        "rope_scaling": None if yarn is None else _stretched(yarn, max_positions),
        "partial_rotary_factor": partial_rotary_factor,
        "group_norm_size": norm_groups,
        "linear_silu": silu,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "num_experts": experts,
        **bailing_fields(layers, group, head_dim),
        **SPECIAL_IDS,
    }
    config |= latent_fields(head_dim, query_rank) if latent else {"model_type": "bailing_moe_linear"}
    if experts:
        config |= {"num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1}
        config |= {"moe_intermediate_size": intermediate // 4, "routed_scaling_factor": 2.0}
        config |= {"n_group": expert_groups, "topk_group": (expert_groups + 1) // 2, "norm_topk_prob": True}
        config |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    weights = [_layer(config, index) for index in range(layers)]
    folder = save_checkpoint(path, config, model_shapes(config, "word_embeddings", weights), dtype, seed)
    if silent:
        silence(folder, [f"model.layers.{i}.attention.dense" for i in range(group - 1, layers, group)])
    return folder


def _stretched(factor: float, positions: int) -> dict[str, Any]:
    original = int(positions / factor)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _layer(config: dict[str, Any], index: int) -> dict[str, Shape]:
    """Return the shapes of a layer's weights."""
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    linear = bool((index + 1) % config["layer_group_size"])
    if linear or "kv_lora_rank" not in config:
        rows = heads + 2 * (heads if linear else config["num_key_value_heads"])
        attention: dict[str, Shape] = {
            "query_key_value": (rows * size, hidden),
            "query_layernorm": (size,),
            "key_layernorm": (size,),
        }
        if linear:
            attention |= {"g_proj": (heads * size, hidden), "g_norm": (heads * size,)}
    else:
        attention = latent_attention(config)
    attention |= {"dense": (hidden, heads * size)}
    return bailing_layer(config, index, attention)
