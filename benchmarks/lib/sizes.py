"""Random models by size and family, kept in the user's cache between runs."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RandomModel:
    """A random model in the shape of the family ``like``; the function ``save`` of ``module`` saves the model
    with the arguments ``shape``."""

    like: str
    save: str
    shape: dict[str, Any]
    module: str = "random_models"


_LIKE: dict[str, Any] = {"hidden": 768, "intermediate": 2304, "heads": 8, "head_dim": 128, "vocab": 32768}
_HYBRID: dict[str, Any] = {"full_attention_interval": 4, "kv_heads": 2, "linear_head_dim": 128}
_THREE_OF_FOUR = [*["linear_attention"] * 3, "full_attention"] * 4
SIZES = {
    "tiny": RandomModel("qwen3_5", "save_hybrid_model", {"layers": 4, "hidden": 128}),
    "150m": RandomModel(
        "qwen3_5",
        "save_hybrid_model",
        _LIKE | _HYBRID | {"layers": 16, "linear_key_heads": 8, "linear_value_heads": 8},
    ),
    "400m": RandomModel(
        "qwen3_5",
        "save_hybrid_model",
        _LIKE
        | _HYBRID
        | {"layers": 24, "hidden": 1024, "intermediate": 3584, "head_dim": 256}
        | {"linear_key_heads": 16, "linear_value_heads": 16},
    ),
    "150m-mamba2": RandomModel(
        "granite4",
        "save_text_model",
        {
            "name": "GraniteMoeHybrid",
            "fields": {
                "num_hidden_layers": 16,
                "layer_types": _THREE_OF_FOUR,
                "hidden_size": 768,
                "intermediate_size": 2304,
                "shared_intermediate_size": 2304,
                # The model has an MLP without experts.
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "attention_multiplier": 0.125,
                "mamba_n_heads": 24,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "position_embedding_type": "rope",
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "vocab_size": 32768,
                "tie_word_embeddings": True,
            },
        },
    ),
    "150m-kda": RandomModel(
        "kimi_linear",
        "save_kimi_model",
        _LIKE | {"layer_types": _THREE_OF_FOUR, "linear_heads": 8, "linear_head_dim": 128},
        module="random_kimi",
    ),
    "150m-lightning": RandomModel(
        "bailing_hybrid", "save_ring_model", _LIKE | {"layers": 16, "group": 4}, module="random_ring"
    ),
    "150m-windows": RandomModel(
        "gemma3",
        "save_text_model",
        {
            "name": "Gemma3Text",
            "norm_center": 0.0,
            "fields": {
                "num_hidden_layers": 18,
                "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
                "sliding_window": 1024,
                "hidden_size": 768,
                "intermediate_size": 2304,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "query_pre_attn_scalar": 128,
                "vocab_size": 32768,
            },
        },
    ),
}


def random_model(size: str) -> Path:
    """Return the folder of the random model of this size, and make the model on first use."""
    model = SIZES[size]
    module = importlib.import_module(f".{model.module}", __package__)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = cache / "vllm-hypic" / f"random-{model.like}-{size}"
    if not (path / "config.json").exists():
        partial = path.with_name(path.name + ".partial")
        getattr(module, model.save)(partial, max_positions=131072, **model.shape)
        partial.rename(path)
    return path
