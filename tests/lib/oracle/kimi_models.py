"""Models with Kimi delta attention, by name, and their oracles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_kimi import save_kimi_model

from .bailing_models import save_bailing_model
from .kimi import FULL, LINEAR, BailingOracle, KimiDeltaOracle, KimiOracle


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
