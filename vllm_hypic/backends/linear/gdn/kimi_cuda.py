"""Kimi delta attention (KDA) under PIC on CUDA: Triton operators beside vLLM's own kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from ...ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights
from ..base import Scratch
from ..layout import LinearStep
from .cuda import CUDADeltaNet
from .kimi import BailingDelta, KimiDelta

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


@dataclass(frozen=True)
class _Rows(GatedDeltaInputs):
    """Operator inputs plus ``opening [rows, H, K]``, the gates of the output's norm."""

    opening: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> _Rows:
        return _Rows(self.mixed[tokens], self.a[tokens], self.b[tokens], self.opening[tokens])


class HypicCUDAKimiDeltaNet(KimiDelta, CUDADeltaNet, KimiGatedDeltaNetAttention):
    """Kimi-Linear's layer plus capture and composition.  For rows that our operators do not run, the stock
    ``_forward`` runs convolution, recurrence and norm."""

    @eager_break_during_capture
    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Same contract as the stock method: ``mixed_qkv [n, 3 H K]``, gates of the recurrence and of its
        output ``g1 [1, n, H, K]``, ``g2 [n, H, K]``, ``beta [1, n, H]``, ``core_attn_out [1, n, H, K]``."""
        if get_forward_context().attn_metadata is not None:  # vLLM's profile run has no metadata
            self.run(_Rows(mixed_qkv, g1[0], beta[0], g2), core_attn_out[0])

    def run_special(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        work: LinearStep,
        x: GatedDeltaInputs,
        out: torch.Tensor,
    ) -> None:
        super().run_special(runtime, step, work, x, out)
        assert isinstance(x, _Rows)
        # The norm runs over all rows, because stock code overwrites its rows afterwards.
        out.copy_(self.o_norm(out[None], x.opening)[0])

    def run_stock(self, x: GatedDeltaInputs, out: torch.Tensor) -> None:
        assert isinstance(x, _Rows)
        KimiGatedDeltaNetAttention._forward(self, x.mixed, x.a[None], x.opening, x.b[None], out[None])

    def gate_bound(self) -> float | None:
        bound: float | None = self.gate_lower_bound
        return bound


class HypicCUDABailingDeltaNet(BailingDelta, CUDADeltaNet, BailingMoeV3KimiDeltaAttention):
    """Bailing V3's layer plus capture and composition.

    vLLM's custom operator looks the layer up by name and calls ``_forward`` with separate q, k and v, log
    decays and write strengths.  So the compiled graph is stock vLLM's.
    """

    def _forward(
        self,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Run the layer's core into ``core_attn_out [1, n, H, K]``, with the contract of the stock method.

        ``q_proj_states``, ``k_proj_states``, ``v_proj_states [n, H K]``; ``g1 [1, n, H, K]``: log decays;
        ``beta [1, n, H]``: write strengths."""
        if not self.hypic_reached:  # the test avoids a slow assignment to a module's attribute
            self.hypic_reached = True
        runtime = self.hypic_runtime
        parts = q_proj_states, k_proj_states, v_proj_states
        if runtime is None or runtime.step is None:
            BailingMoeV3KimiDeltaAttention._forward(self, *parts, g1, beta, core_attn_out)
        else:
            self.run(GatedDeltaInputs(torch.cat(parts, -1), g1[0], beta[0]), core_attn_out[0])

    def run_stock(self, x: GatedDeltaInputs, out: torch.Tensor) -> None:
        parts = x.mixed.chunk(3, -1)
        BailingMoeV3KimiDeltaAttention._forward(self, *parts, x.a[None], x.b[None], out[None])

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        own = super().scratch(rows, dtype)
        side_by_side = rows * self.conv_dim // self.tp_size * dtype.itemsize  # q, k and v
        return own._replace(working=own.working + side_by_side)

    def weights(self) -> GatedDeltaWeights:
        return replace(super().weights(), gates_given=True)
