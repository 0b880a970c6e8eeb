"""Lightning attention under PIC on CPU: each head has a constant decay, and the layer rotates q and k.

Per head ``S <- e^{-slope} S + k v^T``, ``y = S^T q``; arXiv:2401.04658, with the RoPE of MiniMax-01's
attention layers (arXiv:2501.08313).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.platforms import current_platform

from ....pool.families import LIGHTNING
from ...ops.decay_attention import DecayAttentionInputs
from .base import DecayingLayer
from .rotation import rotating_exactly

if TYPE_CHECKING:
    from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata


class HypicLightning(DecayingLayer, BailingMoELinearAttention):
    """vLLM's layer plus capture, composition and the recurrence of plain rows.

    Stock code computes projections, norms, rotation and gate; our operators compute the recurrence.
    """

    family = LIGHTNING

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log_decays = -self.tp_slope.flatten().float()
        if self.linear_rope and (exact := rotating_exactly(self.rotary_emb)) is not None:
            self.rotary_emb, self._table = exact, exact.hypic_rotations

    def _forward(self, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor) -> None:
        """Run the layer into ``output``, with the contract of the stock method."""
        if get_forward_context().attn_metadata is None:
            self.hypic_reached = True
            output.zero_()  # in vLLM's profile run, stock code leaves uninitialised memory
            return
        super()._forward(hidden_states, output, positions)

    def _prefill_and_mix_infer(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        state_indices_tensor: torch.Tensor,
        attn_metadata: BailingLinearAttentionMetadata,
    ) -> torch.Tensor:
        """Run the recurrence, as stock does: ``q``, ``k``, ``v [rows, H, K]`` fp32 -> ``[rows, H K]``."""
        out = torch.empty(v.shape)
        self.run(DecayAttentionInputs(q, k, v, self._log_decays), out)
        return out.flatten(1)

    _decode_infer = _prefill_and_mix_infer

    def refusal(self) -> str | None:
        if current_platform.is_cuda():
            return "lightning attention on GPUs (served on CPUs)"
        if self.linear_rope and self._table is None:
            kind = type(self.rotary_emb).__name__.removeprefix("Hypic")
            return f"lightning attention rotated by {kind} (states cannot be relocated; served: RoPE, YaRN)"
        return None
