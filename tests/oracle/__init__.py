"""The independent oracle: position-independent caching in plain torch, and tiny random models for it."""

from .gemma2 import Gemma2Oracle
from .mamba2 import Mamba2Oracle
from .mamba2_models import save_mamba2_model
from .masked import MaskedOracle
from .mla import MLAOracle
from .models import (
    random_segments,
    save_attention_model,
    save_hybrid_model,
    save_mla_model,
    save_short_conv_model,
)
from .oracle import FAULTS, Oracle
from .short_conv import ShortConvOracle

__all__ = [
    "FAULTS",
    "Gemma2Oracle",
    "MLAOracle",
    "Mamba2Oracle",
    "MaskedOracle",
    "Oracle",
    "ShortConvOracle",
    "random_segments",
    "save_attention_model",
    "save_hybrid_model",
    "save_mamba2_model",
    "save_mla_model",
    "save_short_conv_model",
]
