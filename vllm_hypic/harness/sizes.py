"""Random models by size and family, kept in the user's cache between runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RandomModel:
    """A random model: ``like`` is the family that it is shaped after, ``save`` what of ``random_models.py``
    saves it, ``shape`` the arguments."""

    like: str
    save: str
    shape: dict[str, Any]


SIZES = {
    "tiny": RandomModel("qwen3_5", "save_hybrid_model", {"layers": 4, "hidden": 128}),
    "150m": RandomModel(
        "qwen3_5",
        "save_hybrid_model",
        {
            "layers": 16,
            "full_attention_interval": 4,
            "hidden": 768,
            "intermediate": 2304,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 128,
            "linear_head_dim": 128,
            "linear_key_heads": 8,
            "linear_value_heads": 8,
            "vocab": 32768,
        },
    ),
    "400m": RandomModel(
        "qwen3_5",
        "save_hybrid_model",
        {
            "layers": 24,
            "full_attention_interval": 4,
            "hidden": 1024,
            "intermediate": 3584,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 256,
            "linear_head_dim": 128,
            "linear_key_heads": 16,
            "linear_value_heads": 16,
            "vocab": 32768,
        },
    ),
    "150m-mamba2": RandomModel(
        "granite4",
        "save_mamba2_model",
        {
            "layers": 16,
            "attention_interval": 4,
            "hidden": 768,
            "intermediate": 2304,
            "heads": 12,
            "kv_heads": 4,
            "mamba_heads": 24,
            "mamba_head_dim": 64,
            "mamba_state": 128,
            "vocab": 32768,
        },
    ),
    "150m-windows": RandomModel(
        "gemma3",
        "save_windowed_model",
        {
            "layers": 18,
            "attention_interval": 6,
            "window": 1024,
            "hidden": 768,
            "intermediate": 2304,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 128,
            "vocab": 32768,
        },
    ),
}


def random_model(size: str) -> Path:
    """Folder of the random model of this size; made on first use."""
    from . import random_models

    model = SIZES[size]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = cache / "vllm-hypic" / f"random-{model.like}-{size}"
    if not (path / "config.json").exists():
        partial = path.with_name(path.name + ".partial")
        getattr(random_models, model.save)(partial, max_positions=131072, **model.shape)
        partial.rename(path)
    return path
