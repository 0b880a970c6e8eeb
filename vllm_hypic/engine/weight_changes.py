"""Decides which calls of workers leave the weights unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HARMLESS = frozenset(
    (
        *("annotate_profile", "profile", "check_health", "synchronize_device", "wait_for_comm"),
        *("checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums"),
        *("save_sharded_state", "save_tensorized_model", "list_loras", "hypic_calls"),
        *("reset_encoder_cache", "reset_mm_cache", "release_late_interaction_query_cache"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
        *("execute_dummy_batch", "take_draft_token_ids", "update_max_model_len", "vocab_size"),
    )
)
"""Methods of vLLM's workers and of the plugin's workers that change no weights."""


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Return whether a call of ``method`` on workers may change weights.
    The answer is true for every call not known as harmless, a user's own functions and methods included."""
    return not isinstance(method, str) or not (method in _HARMLESS or method.startswith("get_"))
