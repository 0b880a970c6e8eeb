"""Random checkpoints of Ring and Ling 2.5 and of Ring-linear 2.0, and their oracles."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_ring import save_ring_model

from .bailing import BailingOracle, RingLinearOracle

GROUPED = "ring-linear"
"""Names of models with grouped-query attention begin so; the others attend to latents."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 8, "query_rank": 48},
    "silu": {"silu": True, "norm_groups": 4, "partial_rotary_factor": 1.0},
    "yarn": {"yarn": 4.0, "max_positions": 4096},
    f"{GROUPED}-dense": {"kv_heads": 2},
    f"{GROUPED}-experts": {"kv_heads": 1, "experts": 16, "expert_groups": 4, "norm_groups": 4},
}


def save(path: Path, name: str, **fields: Any) -> Path:
    """Save the model of this name, in float32."""
    return save_ring_model(path, **{"layers": 4, "dtype": torch.float32} | MODELS[name] | fields)


def oracle(path: Path, name: str) -> BailingOracle:
    return RingLinearOracle(path) if name.startswith(GROUPED) else BailingOracle(path)
