"""Random checkpoints of models with Kimi delta attention, by name, and their oracles."""

from collections.abc import Callable
from functools import partial
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
from benchmarks.lib.random_kimi import TAPS, delta_attention, save_kimi_model
from benchmarks.lib.random_models import SPECIAL_IDS

from .kimi import FULL, LINEAR, BailingOracle, KimiDeltaOracle, KimiOracle


def save_bailing_model(
    path: str | Path,
    *,
    groups: int = 1,
    group_size: int = 2,
    query_rank: int | None = None,
    output_gate: str | None = None,
    gate_bound: float | None = -5.0,
    experts: int = 0,
    silent: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Save a random Bailing V3 of `groups` groups of layers; the last layer of each group has attention.

    Weights have the names that vLLM's loader knows. `query_rank`: channels of the low-rank queries;
    `output_gate`: attention's gate, `head_wise` or `element_wise`; `gate_bound`: factor of the sigmoid that
    gives log decays; `experts`: experts of every layer but the first, of which a token uses two, beside a
    shared expert; `silent`: attention layers add nothing.
    """
    layers, head_dim = groups * group_size, 32
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "gated_attention_proj_granularity_type": output_gate,
        "rope_theta": 10000.0,
        "no_kda_lora": True,
        "kda_safe_gate": gate_bound is not None,
        "kda_lower_bound": gate_bound,
        "short_conv_kernel_size": TAPS,
        "num_experts": experts,
        "first_k_dense_replace": 1 if experts else layers,
        "vocab_size": 512,
        "max_position_embeddings": 32768,
        **bailing_fields(layers, group_size, head_dim),
        **latent_fields(head_dim, query_rank),
        **SPECIAL_IDS,
    }
    if experts:
        config |= {"num_experts_per_tok": 2, "num_shared_experts": 1, "n_group": 4, "topk_group": 2}
        config |= {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
        config |= {"routed_scaling_factor": 2.0}
    attention = range(group_size - 1, layers, group_size)
    shapes = [_layer(config, index in attention, index) for index in range(layers)]
    folder = save_checkpoint(path, config, model_shapes(config, "word_embeddings", shapes), dtype, seed=0)
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


def save_kimi(path: Path, pairs: int, **fields: Any) -> Path:
    return save_kimi_model(path, layer_types=[LINEAR, FULL] * pairs, **fields)


def save_bailing(path: Path, pairs: int, **fields: Any) -> Path:
    return save_bailing_model(path, groups=pairs, **fields)


MODELS: dict[str, Callable[..., Path]] = {
    "dense": save_kimi,
    "bounded-gates": partial(save_kimi, gate_bound=-5.0),
    "experts": partial(save_kimi, experts=8),
    "bailing": partial(save_bailing, output_gate="head_wise"),
    "bailing-unbounded": partial(save_bailing, gate_bound=None, output_gate="element_wise"),
    "bailing-experts": partial(save_bailing, experts=8, query_rank=96),
}


def save_delta_model(path: Path, name: str, pairs: int, **fields: Any) -> Path:
    """In float32, of so many pairs of a linear layer and one of attention."""
    return MODELS[name](path, pairs=pairs, dtype=torch.float32, **fields)


def delta_oracle(path: Path, name: str) -> KimiDeltaOracle:
    return BailingOracle(path) if name.startswith("bailing") else KimiOracle(path)
