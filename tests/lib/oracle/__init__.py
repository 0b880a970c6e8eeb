"""The independent oracle: position-independent caching in plain torch, and tiny random models for it."""

import json
from pathlib import Path

from .mamba1 import Mamba1Oracle
from .mamba2 import Mamba2Oracle
from .mamba_models import save_mamba_model
from .models import random_segments, save_mla_model, save_short_conv_model
from .olmo import save_olmo_model
from .oracle import FAULTS, Oracle

save_mamba1_model = save_mamba2_model = save_mamba_model


def mamba_oracle(model: Path) -> Oracle:
    """Of a checkpoint with layers of Mamba1 or Mamba2."""
    kind = json.loads((model / "config.json").read_text())["model_type"]
    return Mamba1Oracle(model) if kind in Mamba1Oracle.model_types else Mamba2Oracle(model)


__all__ = ["FAULTS", "Oracle", "mamba_oracle", "random_segments", "save_mamba1_model", "save_mamba2_model",
           "save_mla_model", "save_olmo_model", "save_short_conv_model"]  # fmt: skip
