"""Linear layers that vLLM has no class for: what it asks of a layer with a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.mamba.abstract import MambaBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OwnLayer(nn.Module, MambaBase):
    """Mixin behind :class:`~.base.LinearLayer`, of a model class of ours.

    ``forward(positions [tokens], hidden [tokens, hidden]) -> [tokens, hidden]``.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.model_config, self.cache_config = vllm_config.model_config, vllm_config.cache_config
        self.config: Any = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.tp_size, self.tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Duplicate layer name: {prefix}")
        layers[prefix] = self

    @classmethod
    def state_shapes(cls, config: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Of a layer's states on one of so many ranks."""
        raise NotImplementedError

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype, cache_config: Any) -> tuple[torch.dtype, ...]:
        """In a model of ``dtype``."""
        raise NotImplementedError

    @classmethod
    def state_copies(cls) -> tuple[Any, ...]:
        """How vLLM copies each of them."""
        raise NotImplementedError

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.state_shapes(self.config, self.tp_size)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.state_dtypes(self.model_config.dtype, self.cache_config)
