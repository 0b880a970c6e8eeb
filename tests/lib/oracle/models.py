"""The random checkpoints are the benchmark suite's own: both need gates that are alive."""

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_models import SPARE_IDS, SPECIAL_TOKENS, save_text_model
from benchmarks.lib.random_models import save_hybrid_model as save_hybrid_model

SIZES = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
FULL, SLIDING = "full_attention", "sliding_attention"
SHARED_KV: dict[str, dict[str, Any]] = {
    "Gemma3nText": {"laurel_rank": 16, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0]},
    "Gemma4Text": {"global_head_dim": 128, "use_double_wide_mlp": True},
}


def random_segments(lengths: list[int], *, vocab: int = 512, seed: int = 0) -> list[list[int]]:
    """Token lists of the given lengths, of ordinary words only."""
    rng = random.Random(seed)
    return [[rng.randrange(len(SPECIAL_TOKENS), vocab - SPARE_IDS) for _ in range(n)] for n in lengths]


def save_attention_model(
    path: str | Path,
    *,
    layers: int = 2,
    vocab: int = 512,
    tie: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Save a random dense Qwen3 model: full attention in every layer, the whole head rotated."""
    fields = {"hidden_size": 128, "head_dim": 64, "vocab_size": vocab, "tie_word_embeddings": tie}
    return _save_layers(path, "Qwen3", [FULL] * layers, fields, dtype=dtype)


def save_shared_kv_model(path: str | Path, *, name: str, window: int, seed: int = 0, **given: Any) -> Path:
    """A random model of transformers' `<name>Config` whose last two of five layers, one with a window and one
    without, read the K and V of the last layer of their kind before them; `given`: fields of another."""
    fields = {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "sliding_window": window,
        "head_dim": 64,
        "hidden_size": 256,  # its root, by which embeddings are multiplied, is exact in any dtype
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "final_logit_softcapping": 5.0,
    }
    return save_text_model(path, name=name, fields=SIZES | fields | SHARED_KV[name] | given, seed=seed)


def save_mla_model(
    path: str | Path, *, layers: int = 2, q_lora: bool = False, experts: bool = False, yarn: bool = False
) -> Path:
    """A random DeepSeek-V2 in float32, whose layers but the first have experts where asked for.

    Latents of 512 and keys of 64, as published models have them: vLLM's kernels for CPUs know no others, and
    those with AMX want multiples of 32 elsewhere.
    """
    scaled = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    scaled |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5}
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 96 if q_lora else None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "rope_parameters": {"rope_theta": 10000.0, **(scaled if yarn else {"rope_type": "default"})},
        "first_k_dense_replace": 1 if experts else layers,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.0,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    limit = 163840 if yarn else 131072
    return save_text_model(path, name="DeepseekV2", fields=fields, max_positions=limit, dtype=torch.float32)


def save_short_conv_model(path: str | Path, *, layer_types: list[str], seed: int = 0) -> Path:
    """A random LFM2 in float32, whose layers are of type `conv` and `full_attention`."""
    fields = {
        "hidden_size": 128,
        "block_auto_adjust_ff_dim": False,
        # As published models have them, and vLLM asks for.
        "block_dim": 128,
        "conv_dim": 128,
        "tie_word_embeddings": True,  # vLLM ties them whatever stands here
    }
    return _save_layers(path, "Lfm2", layer_types, fields, dtype=torch.float32, seed=seed)


def save_soft_capped_model(path: str | Path, *, window: int, layer_types: list[str], seed: int = 0) -> Path:
    """A random Gemma 2 whose scores have a standard deviation of 4 before a cap of 3."""
    fields = {
        "hidden_size": 256,  # its root, by which embeddings are multiplied, is exact in any dtype
        "head_dim": 64,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 3.0,
        # A random model with tied embeddings repeats its last token; capped, that leaves the others a chance.
        "final_logit_softcapping": 5.0,
        "sliding_window": window,
    }
    return _save_layers(path, "Gemma2", layer_types, fields, norm_center=0.0, seed=seed)


def save_windowed_model(path: str | Path, *, window: int, layer_types: list[str], seed: int = 0) -> Path:
    """A random Llama whose layers of type `sliding_attention` have a window of so many tokens."""
    fields = {"hidden_size": 128, "head_dim": 64, "sliding_window": window, "tie_word_embeddings": False}
    return _save_layers(path, "Llama", layer_types, fields, seed=seed)


def _save_layers(
    path: str | Path, name: str, layer_types: list[str], fields: dict[str, Any], **given: Any
) -> Path:
    fields = {"num_hidden_layers": len(layer_types), "layer_types": layer_types} | fields
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return save_text_model(path, name=name, fields=SIZES | rope | fields, **given)
