"""The layers of flash-linear-attention's RetNet and GLA under PIC, on CPU.

Per head ``S <- Diag(e^g) S + k v^T``, ``y = S^T q / sqrt(K)``, with outputs normalised per head and gated by
SiLU.  Retention (arXiv:2307.08621) has ``g = log(1 - 2^{-5-h})`` and rotates q and k.  Gated linear attention
(arXiv:2312.06635) projects a gate per channel and does not rotate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ....pool.families import GATED_LINEAR, LIGHTNING
from ...ops.decay_attention import DecayAttentionInputs
from ..lightning.base import DecayingLayer
from ..lightning.rotation import rotating_exactly
from ..own_layer import OwnLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NORMALIZER, GATE_RANK = 16, 16
"""The divisor of GLA's log gates and the rank of their projection, both absent from GLA's configuration."""


class DecayMixer(DecayingLayer, OwnLayer):
    """A layer with projections and norm under the checkpoint's names, and its recurrence in fp32."""

    refusal = OwnLayer.refusal

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        config, heads = self.config, self.config.num_heads
        self.heads = heads // self.tp_size
        self.key_size, self.value_size = config.key_dim // heads, config.value_dim // heads
        self.sizes = [self.heads * size for size in (self.key_size, self.key_size, self.value_size)]
        self._make_projections(gated=config.use_output_gate)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        n = len(hidden)
        q, k, v = self.qkv_proj(hidden)[0].float().split(self.sizes, dim=-1)
        q, k = self._rotated(positions, q, k)
        q, k = (rows.view(n, self.heads, self.key_size) for rows in (q * self.key_size**-0.5, k))
        y = v.new_zeros(n, self.heads, self.value_size)
        torch.ops.vllm.hypic_decay_attention(
            q, k, v.view(y.shape), self._log_decays(hidden), y, _encode_layer_name(self.prefix)
        )
        return self._projected(y.to(hidden.dtype), hidden)

    def core(self, x: DecayAttentionInputs, out: torch.Tensor) -> None:
        """Run the recurrence of the whole batch into ``out [n, H, V]``; capture and compose records."""
        if get_forward_context().attn_metadata is None:
            self.hypic_reached = True
            return  # vLLM's profile run has no metadata
        self.run(x, out)

    def _rotated(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``q`` and ``k [n, H K]``, rotated if the layer rotates."""
        return q, k

    def _log_decays(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return log decays in fp32: ``[H]``, or ``[n, H, K]`` for every row and channel."""
        raise NotImplementedError

    def get_attn_backend(self) -> Any:
        return BailingLinearAttentionBackend

    @classmethod
    def state_shapes(cls, config: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
        heads = config.num_heads
        return ((heads // ranks, config.key_dim // heads, config.value_dim // heads),)

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype, cache_config: Any) -> tuple[torch.dtype, ...]:
        """Return the state's dtype, fp32 by default."""
        found = MambaStateDtypeCalculator.kda_state_dtype(
            dtype, cache_config.mamba_cache_dtype, cache_config.mamba_ssm_cache_dtype
        )
        return (found[1],)

    @classmethod
    def state_copies(cls) -> tuple[Any, ...]:
        found: tuple[Any, ...] = MambaStateCopyFuncCalculator.linear_attention_state_copy_func()
        return found


class RetentionMixer(DecayMixer):
    """The layer of RetNet."""

    family = LIGHTNING
    called = "retention"

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        first = self.tp_rank * self.heads
        decays = 1 - 2.0 ** (-5.0 - torch.arange(first, first + self.heads, dtype=torch.float64))
        self.decays = decays.log().float()
        rope = get_rope(
            self.key_size,
            max_position=self.config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        self.rotary_emb = rotating_exactly(rope)
        self._table = self.rotary_emb.hypic_rotations

    def _rotated(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
        return q, k

    def _log_decays(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decays

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR


class GatedLinearMixer(DecayMixer):
    """The layer of GLA."""

    family = GATED_LINEAR
    called = GATED_LINEAR.name
    channel_gates = True

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        hidden, keys, quant = self.config.hidden_size, self.config.key_dim, self.quant_config
        down = ReplicatedLinear(
            hidden,
            GATE_RANK,
            bias=False,
            return_bias=False,
            quant_config=quant,
            prefix=f"{prefix}.gk_proj.0",
        )
        up = ColumnParallelLinear(
            GATE_RANK, keys, return_bias=False, quant_config=quant, prefix=f"{prefix}.gk_proj.1"
        )
        self.gk_proj = nn.Sequential(down, up)

    def _log_decays(self, hidden: torch.Tensor) -> torch.Tensor:
        g = F.logsigmoid(self.gk_proj(hidden).float()) / NORMALIZER
        if self.config.clamp_min is not None:
            g = g.clamp(min=self.config.clamp_min)
        return g.view(len(hidden), self.heads, self.key_size)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """``CUSTOM``: vLLM has no type for layers with a gate per channel."""
        return MambaAttentionBackendEnum.CUSTOM


def _hypic_decay_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decays: torch.Tensor,
    out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Run the core of the named layer into ``out``, as a custom operator."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.core(DecayAttentionInputs(q, k, v, log_decays), out)


direct_register_custom_op(
    op_name="hypic_decay_attention", op_func=_hypic_decay_attention, mutates_args=["out"]
)
