"""The random checkpoints are the benchmark suite's own: both need gates that are alive."""

from vllm_hypic.harness.random_models import random_segments, save_attention_model, save_hybrid_model

__all__ = ["random_segments", "save_attention_model", "save_hybrid_model"]
