"""Gated short convolutions under PIC on CUDA: Triton operators beside vLLM's own kernels.

vLLM's custom operator looks the layer up by name and calls its ``forward_cuda``.  So the compiled graph is
stock vLLM's, and the plugin replaces that method alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from ....pool.shared import Once
from ...ops.linear_layer import limits
from ...ops.short_conv import ShortConvInputs, ShortConvWeights
from ..base import Scratch
from ..cuda import SharedPlans, warm_up_plans
from ..layout import Composed, Segments, StockRows
from ..mamba_rows import MambaRows, slots_of
from .base import HiddenRows, HypicShortConv

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext
    from ...ops.linear_layer.triton.plan import ComposePlan, SegmentPlan


class HypicCUDAShortConv(HypicShortConv):
    """vLLM's CUDA layer plus capture and composition."""

    _constants: ShortConvWeights | None = None

    def forward_cuda(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Run the layer into ``output``, with the contract of the stock method."""
        if get_forward_context().attn_metadata is None:
            # In a profile run or a probe, stock code leaves uninitialised memory, which may be NaN.
            output.zero_()
        self.run(HiddenRows(hidden_states), output)

    def run_stock(self, x: HiddenRows, out: torch.Tensor) -> None:
        ShortConv.forward_cuda(self, x.hidden, out)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        plan = step.shared.of(SharedPlans).segments(segments, step.device)
        self._run(plan, runtime, step, segments, x, out)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        plan = step.shared.of(SharedPlans).compose(composed, step.device)
        self._run(plan, runtime, step, composed, x, out)

    def _run(
        self,
        plan: SegmentPlan | ComposePlan,
        runtime: HypicRuntime,
        step: StepContext,
        program: Segments | Composed,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        from ...ops.short_conv.triton import operators

        metadata = get_forward_context().attn_metadata[self.prefix]
        caches = self.caches(step.shared.of(SharedPlans).slots(metadata, slots_of))
        records, weights = self.records(runtime), self._weights()

        def run(inputs: ShortConvInputs, convolved: torch.Tensor) -> None:
            operators.run(plan, inputs, weights, caches, convolved, records)

        (tokens,) = step.shared.of(SharedPlans)(
            program, "tokens", lambda: step.on_device(program.tokens.numpy())
        )
        self.projected(x, out, tokens, run)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> ShortConvAttentionMetadata:
        """Return the metadata that vLLM's builder would make for these rows alone."""
        common = step.shared.of(_SharedRows)(lambda: MambaRows.of(step, metadata, rows))
        slots = step.shared.of(SharedPlans).slots(metadata, slots_of)
        return ShortConvAttentionMetadata(**common.fields(metadata, slots))

    def kernel_refusal(self) -> str | None:
        """Return why the Triton operators do not serve this layer, or ``None``."""
        (conv,) = self.kv_cache
        reason = limits.refuses(len(self._weights().weight), conv, conv)
        return None if reason is None else f"short convolution with {reason}"

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile the operators for every chunk length.

        The operators run on the cache's block 0, which vLLM reserves for padding, and on record slot 0 of an
        empty pool.
        """
        from ...ops.short_conv.triton import operators

        weight, weights, records = self.conv.weight, self._weights(), self.records(runtime)
        caches = self.caches(torch.zeros(1, dtype=torch.int32, device=weight.device))
        for n, segments, composing in warm_up_plans(weight.device):
            rows, out = weight.new_zeros(n, weight.size(0)), weight.new_empty(n, weight.size(0))
            x = ShortConvInputs(rows, rows)
            operators.run(segments, x, weights, caches, out, records)
            operators.run(composing, x, weights, caches, out, records)

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        # Per row, `projected` holds three projected parts, value, gate and result of the convolution, and a
        # copy of that result.  The output is one more, or two if tensor-parallel ranks sum it separately.
        channels, hidden = self.conv.weight.size(0), self.conv_dim
        results = 1 if channels == hidden else 2
        return Scratch(rows * (7 * channels + results * hidden) * dtype.itemsize, 0)

    def weights_changed(self) -> None:
        self._constants = None

    def _weights(self) -> ShortConvWeights:
        if self._constants is None:
            self._constants = self.weights()
        return self._constants


class _SharedRows(Once[MambaRows]):
    """The rows of one pass's sub-batch, made by the first layer that requests them."""
