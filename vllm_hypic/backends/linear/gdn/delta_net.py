"""The delta net of flash-linear-attention under PIC, on CPU: the gated delta rule with open gates.

Per head ``S <- (I - beta k k^T) S + beta k v^T``; arXiv:2406.06484.  Nothing decays, so a transition keeps
its norm along directions without keys, and no head dies.  vLLM has no such layer; our operators run all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...ops.gated_delta import GatedDeltaWeights
from ..own_layer import OwnLayer
from .own_recurrence import OwnRecurrence

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IDENTITY_TAPS = 2
"""Taps of the identity convolution for a model without convolution: the operators need at least two taps, and
the last tap passes its input on."""


class CPUDeltaNetMixer(OwnRecurrence, OwnLayer):
    """A delta-net layer: projections, convolutions and norm under the checkpoint's names."""

    called = "the delta net"
    refusal = OwnLayer.refusal

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        config, quant, ranks = self.config, self.quant_config, self.tp_size
        hidden, heads = config.hidden_size, config.num_heads
        self.num_k_heads = self.num_v_heads = heads
        self.head_k_dim, self.head_v_dim = config.key_dim // heads, config.value_dim // heads
        self.conv_dim = 2 * config.key_dim + config.value_dim
        self._make_projections(gated=config.use_gate)
        self.b_proj = ColumnParallelLinear(
            hidden, heads, bias=False, quant_config=quant, prefix=f"{prefix}.b_proj"
        )
        if config.use_short_conv:
            for name, width in zip("qkv", (config.key_dim, config.key_dim, config.value_dim), strict=True):
                self.add_module(f"{name}_conv1d", _Taps(width // ranks, config.conv_size))

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mixed, b = self.qkv_proj(hidden)[0], self.b_proj(hidden)[0]
        core = hidden.new_zeros(len(hidden), self.num_v_heads // self.tp_size, self.head_v_dim)
        gates = torch.zeros_like(b)  # their values have no effect, see `weights`
        torch.ops.vllm.hypic_gdn_attention_core(mixed, b, gates, core, _encode_layer_name(self.prefix))
        return self._projected(core, hidden)

    def weights(self) -> GatedDeltaWeights:
        """Prepare the layer's constants for the operators, with a decay rate of zero: no gate value makes a
        state decay."""
        heads = torch.zeros(self.num_v_heads // self.tp_size)
        largest = 2.0 if self.config.allow_neg_eigval else 1.0
        taps = self.conv_weight().detach().t().float().contiguous()
        return GatedDeltaWeights(taps, None, heads, heads, len(heads), self.l2_eps, largest)

    def conv_weight(self) -> torch.Tensor:
        """Return the depthwise weights ``[channels, k]``; without convolutions, those of the identity."""
        if not self.config.use_short_conv:
            taps = torch.zeros(self.conv_dim // self.tp_size, IDENTITY_TAPS)
            taps[:, -1] = 1
            return taps
        return torch.cat([getattr(self, f"{name}_conv1d").weight.flatten(1) for name in "qkv"])

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    @classmethod
    def state_shapes(cls, config: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
        heads, taps = config.num_heads, config.conv_size if config.use_short_conv else IDENTITY_TAPS
        sizes = config.key_dim // heads, config.value_dim // heads
        found: tuple[tuple[int, ...], ...] = MambaStateShapeCalculator.gated_delta_net_state_shape(
            ranks, heads, heads, *sizes, taps
        )
        return found

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype, cache_config: Any) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the convolution's and the recurrence's state; the latter defaults to fp32."""
        found: tuple[torch.dtype, ...] = MambaStateDtypeCalculator.kda_state_dtype(
            dtype, cache_config.mamba_cache_dtype, cache_config.mamba_ssm_cache_dtype
        )
        return found

    @classmethod
    def state_copies(cls) -> tuple[Any, ...]:
        found: tuple[Any, ...] = MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()
        return found


class _Taps(nn.Module):
    """The ``weight [channels, 1, k]`` of a depthwise convolution on this rank."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": sharded_weight_loader(0)})
