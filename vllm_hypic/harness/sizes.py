"""Random Qwen3.5-shaped models by size, kept in the user's cache between runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "hidden": 128},
    "150m": {
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
    "400m": {
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
}


def random_model(size: str) -> Path:
    """Folder of the random model of this size; made on first use."""
    from .random_models import save_hybrid_model

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = cache / "vllm-hypic" / f"random-qwen3_5-{size}"
    if not (path / "config.json").exists():
        partial = path.with_name(path.name + ".partial")
        save_hybrid_model(partial, max_positions=131072, **SIZES[size])
        partial.rename(path)
    return path
