"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (arXiv:2510.19338): vLLM's Ring 2.5 with partly rotated
grouped-query attention in place of latent attention.

Lightning attention decays as in vLLM's Ring 2.5, and as in SGLang's Ring-linear 2.0 and Ring 2.5.  In layer
``l`` of ``L``, counted from 0, a factor ``1 - l / (L - 1) + 1e-5`` multiplies the slopes.  The checkpoints'
code for transformers has ``l - 1`` in place of ``l``.

The module is needed until vLLM registers the architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models import bailing_moe_linear
from vllm.model_executor.models.bailing_moe import BailingAttention
from vllm.model_executor.models.bailing_moe_linear import BailingMoeV25ForCausalLM

from ..patches.signature import require_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import VllmConfig


class GroupedQueryAttention(BailingAttention):
    """The attention of vLLM's Ling 2.0, with the constructor arguments of Ring 2.5's attention.

    ``forward(hidden [tokens, hidden], positions [tokens]) -> [tokens, hidden]``.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        quant_config: Any = None,
        layer_id: int = 0,
        prefix: str = "attention",
        cache_config: Any = None,
    ) -> None:
        super().__init__(config, cache_config, quant_config, prefix=prefix)


class RingLinearForCausalLM(BailingMoeV25ForCausalLM):
    """The model of architecture ``BailingMoeLinearV2ForCausalLM``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        for reason in _refusals(config):
            raise ValueError(f"{config.architectures[0]}: {reason}")
        with _grouped_query_attention():
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``weights`` by Ring 2.5's loader, with the output projection already renamed.
        The loader itself would rename the projection as latent attention's."""
        named = ((name.replace(".attention.dense.", ".self_attn.dense."), weight) for name, weight in weights)
        loaded: set[str] = super().load_weights(named)
        return loaded


@contextmanager
def _grouped_query_attention() -> Iterator[None]:
    """Give layers that are made inside grouped-query attention.
    Ring 2.5's layers read their attention class from a module global."""
    stock = bailing_moe_linear.BailingMoeV25MLAAttention
    require_parameters(stock, "config", "quant_config", "layer_id", "prefix", "cache_config")
    require_parameters(BailingAttention.forward, "self", "hidden_states", "position_ids")
    bailing_moe_linear.BailingMoeV25MLAAttention = GroupedQueryAttention
    try:
        yield
    finally:
        bailing_moe_linear.BailingMoeV25MLAAttention = stock


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    """Yield reasons against settings that no published model has, and against contradictory settings."""
    layers, group = config.num_hidden_layers, config.layer_group_size
    if group < 1 or layers % group:
        yield f"num_hidden_layers={layers}: expected a multiple of layer_group_size={group}"
    size = config.hidden_size // config.num_attention_heads
    if config.head_dim not in (None, size):
        yield f"head_dim={config.head_dim}: expected hidden_size / num_attention_heads = {size}"
    partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if (beside := getattr(config, "partial_rotary_factor", 1.0)) != partial:
        yield f"partial_rotary_factor={partial} in rope_parameters, {beside} outside: expected equal values"
    rotated = getattr(config, "rotary_dim", None)
    if rotated not in (None, int(size * partial)):
        yield f"rotary_dim={rotated}: expected partial_rotary_factor={partial} of {size}"
    for name, expected in (("use_rmsnorm", True), ("use_linear_gqa", False), ("use_low_rank", False)):
        if (given := getattr(config, name, False)) != expected:
            yield f"{name}={given}: expected {expected}"
