"""Gated DeltaNet under PIC (Qwen3-Next, Qwen3.5 and their MoE forms): what all platforms share.

* Segment requests go through ``gdn_segments``: outputs, running state and the record in one scan.
* Composed requests with compose points in this pass go through ``gdn_compose``, up to the first block
  boundary after the last point.
* All else (plain requests, decode, what composed requests run after that boundary) is stock code over these
  rows only: stock bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from ....pool.families import GATED_DELTA_NET
from ....pool.shared import Once
from ...ops import gated_delta
from ..base import LinearLayer, Scratch
from ..layout import Composed, LinearStep, Segments, StockRows, linear_step, stock_rows

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


_CARRIED = 2
"""Segment requests that are between two prefill chunks at a time; more take of vLLM's reserve."""
_CHUNK = 64
"""Token rows of the longest chunk of the gated delta rule."""
_FLOAT = torch.float32.itemsize


@dataclass
class _SharedParts:
    """What the gated delta layers share of one pass."""

    stock: Once[tuple[StockRows, ForwardContext] | None] = field(default_factory=Once)
    """The rows that stock code runs, and a forward context that holds only them."""
    offered: bool = False
    """The records that become complete have transition blocks."""


class HypicGatedDeltaNet(LinearLayer[gated_delta.Carry], QwenGatedDeltaNetAttention):
    """Stock layer plus capture and composition.

    A platform's subclass leads the stock forward pass to :meth:`core` and says what stock code and our
    operators are there.
    """

    family = GATED_DELTA_NET

    def core(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor) -> None:
        """Recurrence of the whole batch into ``core [n, Hv, V]``, captured and composed as the step says."""
        self.hypic_reached = True
        runtime = self.hypic_runtime
        if runtime is None or runtime.step is None:
            return self.stock_core(mixed_qkv, b, a, core)
        work = linear_step(runtime.step, self.cache_config.block_size)
        if work.empty:
            return self.stock_core(mixed_qkv, b, a, core)
        self._special(runtime, runtime.step, work, gated_delta.Inputs(mixed_qkv, a, b), core)
        # After ours: it goes on from the states that they left.
        stock = self._stock_context(runtime, runtime.step, work)
        if stock is not None:
            rows, context = stock
            tokens = rows.tokens
            out = core[tokens]
            with override_forward_context(context):
                self.stock_core(mixed_qkv[tokens], b[tokens], a[tokens], out)
            if not isinstance(tokens, slice):
                core.index_copy_(0, tokens, out)

    def stock_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor
    ) -> None:
        """vLLM's own code over the batch that the forward context describes."""
        raise NotImplementedError

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: gated_delta.Inputs,
        core: torch.Tensor,
        carries: list[gated_delta.Carry],
    ) -> None:
        """``gdn_segments`` of the platform."""
        raise NotImplementedError

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: gated_delta.Inputs,
        core: torch.Tensor,
    ) -> None:
        """``gdn_compose`` of the platform."""
        raise NotImplementedError

    def sub_batch(
        self, step: StepContext, metadata: GDNAttentionMetadata, rows: StockRows
    ) -> GDNAttentionMetadata:
        """Stock code's metadata of a sub-batch."""
        raise NotImplementedError

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        heads, K, V = self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim
        channels = self.conv_dim // self.tp_size
        terms = heads * (K + V + _CHUNK) * _FLOAT
        return Scratch(rows * (terms + channels * dtype.itemsize), _CARRIED * heads * K * (K + V) * _FLOAT)

    def _special(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        work: LinearStep,
        x: gated_delta.Inputs,
        core: torch.Tensor,
    ) -> None:
        """The rows that our operators run."""
        if work.contexts is not None:
            runtime.calls["compose_context"] += 1
            self.run_composed(runtime, step, work.contexts, x, core)
        if (segments := work.segments) is not None:
            runtime.calls["capture_linear"] += 1
            _offer_blocks(runtime, step, segments)
            self.run_segments(runtime, step, segments, x, core, self._carries(runtime, segments))
        if work.composed is not None:
            runtime.calls["compose"] += 1
            self.run_composed(runtime, step, work.composed, x, core)

    def _carries(self, runtime: HypicRuntime, segments: Segments) -> list[gated_delta.Carry]:
        """What the interiors that are cut here carry, written by this pass or an earlier one."""
        state = runtime.pool.linear[self.prefix].state
        for request, starts in zip(segments.carried, segments.starting, strict=True):
            if starts:
                self.carries[request] = gated_delta.Carry.beside(state)
        return [self.carries[request] for request in segments.carried]

    def _stock_context(
        self, runtime: HypicRuntime, step: StepContext, work: LinearStep
    ) -> tuple[StockRows, ForwardContext] | None:
        """The rows that stock code runs, and a forward context that holds only them; made once per pass."""
        return step.shared.of(_SharedParts).stock(lambda: self._sub_context(runtime, step, work))

    def _sub_context(
        self, runtime: HypicRuntime, step: StepContext, work: LinearStep
    ) -> tuple[StockRows, ForwardContext] | None:
        context = get_forward_context()
        whole = context.attn_metadata
        batch = whole[self.prefix]
        requests = batch.num_decodes + batch.num_prefills
        rows = stock_rows(
            work, step.batch.starts[: requests + 1], step.batch.resumed[:requests], batch.num_decodes
        )
        if rows is None:
            return None
        if not isinstance(rows.tokens, slice):
            (tokens,) = step.on_device(rows.tokens.numpy())
            rows = replace(rows, tokens=tokens)
        # Layers of one group share their metadata, and so the sub-batch's.
        parts = {id(whole[name]): whole[name] for name in runtime.pool.linear}
        subs = {key: self.sub_batch(step, metadata, rows) for key, metadata in parts.items()}
        own = {name: subs[id(whole[name])] for name in runtime.pool.linear}
        return rows, replace(context, attn_metadata=own)


def _offer_blocks(runtime: HypicRuntime, step: StepContext, segments: Segments) -> None:
    """Transition blocks for the records that become complete here, once for all layers of a pass."""
    shared = step.shared.of(_SharedParts)
    if not shared.offered:
        shared.offered = True
        for slot in segments.ended:
            runtime.pool.transition_blocks.offer(slot)
