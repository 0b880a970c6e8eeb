"""Patch: vLLM loads OLMo-Hybrid's convolutions.

Target: ``vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn._make_fused_conv1d_weight_loader``.
Why: a checkpoint has three convolutions, and the layer has one.  vLLM names a tensor's part by the tensor's
attribute ``shard_id``.  The loader of this function expects an argument instead, and fails without it.
Until: vLLM's pull request 55858.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .signature import replaces, require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo

    @replaces(olmo, olmo._make_fused_conv1d_weight_loader, "dims", "tp_size", "tp_rank")
    def make_loader(stock: Any, *args: Any) -> Callable[..., None]:
        load = stock(*args)
        require_parameters(load, "param", "loaded_weight", "loaded_shard_id")

        def weight_loader(
            param: Any, loaded_weight: torch.Tensor, loaded_shard_id: int | None = None
        ) -> None:
            if loaded_shard_id is None:
                loaded_shard_id = loaded_weight.shard_id
            load(param, loaded_weight, loaded_shard_id)

        return weight_loader
