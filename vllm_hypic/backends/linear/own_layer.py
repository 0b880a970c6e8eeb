"""A base of linear layers without a class in vLLM: vLLM's interface of layers with states, and projections
that flash-linear-attention's layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OwnLayer(nn.Module, MambaBase):
    """Mixin behind :class:`~.base.LinearLayer` for layers of our model classes.

    ``forward(positions [tokens], hidden [tokens, hidden]) -> [tokens, hidden]``.
    """

    called: ClassVar[str]
    """The name of such layers in messages."""

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

    def refusal(self) -> str | None:
        """Return why the platform does not run this layer, or ``None``."""
        if not current_platform.is_cpu():
            return f"{self.called} on this platform (served: CPU)"
        return None

    def _make_projections(self, *, gated: bool) -> None:
        """Make ``qkv_proj``, ``o_norm``, ``o_proj`` and, if ``gated``, ``g_proj``: the checkpoint's names,
        with q, k and v fused."""
        config, quant, prefix = self.config, self.quant_config, self.prefix
        hidden, heads = config.hidden_size, config.num_heads
        self.qkv_proj = QKVParallelLinear(
            hidden,
            config.key_dim // heads,
            heads,
            bias=False,
            v_head_size=config.value_dim // heads,
            quant_config=quant,
            prefix=f"{prefix}.qkv_proj",
        )
        self.g_proj: nn.Module | None = None
        norm: dict[str, Any] = {"eps": config.norm_eps}
        if gated:
            self.g_proj = ColumnParallelLinear(
                hidden, config.value_dim, bias=False, quant_config=quant, prefix=f"{prefix}.g_proj"
            )
            self.o_norm: nn.Module = RMSNormGated(config.value_dim // heads, norm_before_gate=True, **norm)
        else:
            self.o_norm = RMSNorm(config.value_dim // heads, **norm)
        self.o_proj = RowParallelLinear(
            config.value_dim, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )

    def _projected(self, read: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output: ``read [tokens, heads, V]``, the heads' outputs, normalised per head,
        gated if the layer has a gate, and projected."""
        rows = read.view(-1, read.shape[-1])
        gate = () if self.g_proj is None else (self.g_proj(hidden)[0].view_as(rows),)
        out: torch.Tensor = self.o_proj(self.o_norm(rows, *gate).view(len(hidden), -1))[0]
        return out

    @classmethod
    def state_shapes(cls, config: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a layer's states on one of ``ranks`` ranks."""
        raise NotImplementedError

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype, cache_config: Any) -> tuple[torch.dtype, ...]:
        """Return the dtypes of a layer's states in a model of ``dtype``."""
        raise NotImplementedError

    @classmethod
    def state_copies(cls) -> tuple[Any, ...]:
        """Return vLLM's functions that copy a layer's states, one per state."""
        raise NotImplementedError

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.state_shapes(self.config, self.tp_size)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.state_dtypes(self.model_config.dtype, self.cache_config)
