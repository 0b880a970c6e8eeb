"""The independent oracle: position-independent caching in plain torch, and tiny random models for it."""

from .models import random_segments, save_attention_model, save_hybrid_model
from .oracle import FAULTS, Oracle

__all__ = ["FAULTS", "Oracle", "random_segments", "save_attention_model", "save_hybrid_model"]
