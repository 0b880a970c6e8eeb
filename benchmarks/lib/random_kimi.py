"""Random checkpoints of Kimi-Linear, with weights under the published names that vLLM's loader knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .random_checkpoints import (
    LATENT,
    ROTATED_PART,
    Shape,
    latent_attention,
    mlp,
    model_shapes,
    save_checkpoint,
    silence,
)
from .random_models import SPECIAL_IDS

TAPS = 4


def save_kimi_model(
    path: str | Path,
    *,
    layer_types: list[str],
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    head_dim: int = 32,
    linear_heads: int = 2,
    linear_head_dim: int = 32,
    gate_bound: float | None = None,
    experts: int = 0,
    silent: bool = False,
    vocab: int = 512,
    max_positions: int = 32768,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random Kimi-Linear; layers are of type `linear_attention` and `full_attention`.

    `gate_bound`: factor of the sigmoid that gives log decays; `experts`: number of experts in every layer but
    the first, of which two are chosen, in two of four groups, beside a shared expert; `silent`: attention
    layers add nothing.
    """
    kinds = [
        [i for i, kind in enumerate(layer_types, 1) if (kind == "linear_attention") == linear]
        for linear in (True, False)
    ]
    linear: dict[str, Any] = {
        "num_heads": linear_heads,
        "head_dim": linear_head_dim,
        "short_conv_kernel_size": TAPS,
    }
    linear |= {"kda_layers": kinds[0], "full_attn_layers": kinds[1]}
    if gate_bound is not None:
        linear["gate_lower_bound"] = gate_bound
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": len(layer_types),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": ROTATED_PART,
        "v_head_dim": head_dim,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "first_k_dense_replace": 1 if experts else len(layer_types),
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        **SPECIAL_IDS,
    }
    if experts:
        config |= {"num_experts": experts, "num_experts_per_token": 2, "num_shared_experts": 1}
        config |= {"moe_intermediate_size": intermediate // 4, "routed_scaling_factor": 2.0}
        config |= {"num_expert_group": 4, "topk_group": 2}
    layers = [_layer(config, kind, index) for index, kind in enumerate(layer_types)]
    folder = save_checkpoint(path, config, model_shapes(config, "embed_tokens", layers), dtype, seed)
    if silent:
        silence(folder, [f"model.layers.{i - 1}.self_attn.o_proj" for i in kinds[1]])
    return folder


def delta_attention(hidden: int, heads: int, K: int) -> dict[str, Shape]:
    """Return the shapes of Kimi delta attention without its gates."""
    channels = heads * K
    shapes: dict[str, Shape] = {f"{part}_proj": (channels, hidden) for part in "qkv"}
    shapes |= {f"{part}_conv1d": (channels, 1, TAPS) for part in "qkv"}
    shapes |= {"b_proj": (heads, hidden), "o_proj": (hidden, channels), "o_norm": (K,)}
    return shapes | {"A_log": (1, 1, heads, 1), "dt_bias": (channels,)}


def _layer(config: dict[str, Any], kind: str, index: int) -> dict[str, Shape]:
    """Return the shapes of a layer's weights."""
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    if kind == "linear_attention":
        heads, K = linear["num_heads"], linear["head_dim"]
        attention = delta_attention(hidden, heads, K)
        for gate in "fg":
            attention |= {f"{gate}_a_proj": (K, hidden), f"{gate}_b_proj": (heads * K, K)}
    else:
        inner = config["num_attention_heads"] * config["v_head_dim"]
        attention = latent_attention(config) | {"o_proj": (hidden, inner)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    if not (experts := config.get("num_experts", 0)) or index < config["first_k_dense_replace"]:
        return shapes | mlp("mlp", hidden, config["intermediate_size"])
    inner = config["moe_intermediate_size"]
    shapes |= {"block_sparse_moe.gate": (experts, hidden)}
    shapes |= {"block_sparse_moe.gate.e_score_correction_bias": (experts,)}
    shapes |= mlp("block_sparse_moe.shared_experts", hidden, inner)
    for expert in range(experts):
        shapes |= mlp(f"block_sparse_moe.experts.{expert}", hidden, inner, ("w1", "w3", "w2"))
    return shapes
