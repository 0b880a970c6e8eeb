"""Mamba1 under PIC on CPU (Jamba, Mamba, Falcon-Mamba): the convolution, then the scan.

vLLM's custom operator looks the layer up by name and calls its ``forward_impl``.  So the compiled graph is
stock vLLM's, and the plugin replaces that method alone.  The stock method, which ``patches/cpu_mamba1.py``
fixes, contains all projections, convolution and scan.  So this module projects composed rows separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadata

from ....pool.appended import append_diagonal
from ....pool.families import MAMBA1
from ....pool.tensors import DiagonalRecords
from ...ops import mamba1
from ...ops.linear_layer.arguments import ConvolutionCaches, StateCaches
from ...ops.mamba1 import Mamba1Carry, Mamba1Inputs, Mamba1Weights
from ...ops.short_conv import ShortConvInputs, ShortConvWeights
from ...ops.short_conv.eager import short_conv_compose, short_conv_segments
from ..base import LinearLayer
from ..layout import Composed, Segments, StockRows
from ..mamba_rows import cpu_fields, slots_of

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext
    from ....pool.tensors import StateRecords

Convolve = Callable[[ShortConvInputs, ShortConvWeights, ConvolutionCaches, torch.Tensor], None]
Scan = Callable[[ModuleType, Mamba1Inputs, Mamba1Weights, StateCaches, torch.Tensor], None]


@dataclass(frozen=True)
class HiddenRows:
    """Token rows before the layer's projections: ``hidden [rows, hidden size]``."""

    hidden: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> HiddenRows:
        """Return the rows ``tokens`` alone."""
        return HiddenRows(self.hidden[tokens])


class HypicMamba1(LinearLayer[HiddenRows, Mamba1Carry], MambaMixer):
    """vLLM's layer plus capture by ``mamba1_segments`` and composition by ``mamba1_compose``."""

    family = MAMBA1

    def forward_impl(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Run the layer into ``output``, with the contract of the stock method."""
        self.run(HiddenRows(hidden_states), output)

    def run_stock(self, x: HiddenRows, out: torch.Tensor) -> None:
        MambaMixer.forward_impl(self, x.hidden, out)

    def run_segments(
        self, runtime: HypicRuntime, step: StepContext, segments: Segments, x: HiddenRows, out: torch.Tensor
    ) -> None:
        records, carries = self._records(runtime), self._cut(runtime, segments)
        convolve = partial(short_conv_segments, records=records, rows=segments.rows)

        def scan(ops: ModuleType, *layer: Any) -> None:
            ops.mamba1_segments(*layer, records, segments.rows, carries)

        self._special(x, out, segments.tokens, convolve, scan)

    def run_composed(
        self, runtime: HypicRuntime, step: StepContext, composed: Composed, x: HiddenRows, out: torch.Tensor
    ) -> None:
        records, rows, operations = self._records(runtime), composed.rows, composed.ops
        convolve = partial(short_conv_compose, records=records, rows=rows, ops=operations)

        def scan(ops: ModuleType, *layer: Any) -> None:
            ops.mamba1_compose(*layer, records, rows, operations)

        self._special(x, out, composed.tokens, convolve, scan)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Mamba1AttentionMetadata:
        slots = slots_of(metadata)[torch.tensor(rows.batch_rows)]
        fields = cpu_fields(metadata, rows, slots)
        return Mamba1AttentionMetadata(**fields, state_indices_tensor_d=slots[: rows.decodes, None])

    def append(self, records: StateRecords, slot: int, base: int, dead_transition: float) -> None:
        assert isinstance(records, DiagonalRecords)
        decay = torch.exp(self.A.detach().float() * records.elapsed[slot][:, None])
        append_diagonal(records.state, decay, slot, base)
        records.elapsed[slot] += records.elapsed[base]

    def refusal(self) -> str | None:
        return "Mamba1 on GPUs (served on CPUs)" if current_platform.is_cuda() else None

    def kernel_refusal(self) -> str | None:
        """Return why the C++ operators do not serve this layer, or ``None``."""
        return mamba1.native.refuses(self.conv1d.weight.dtype, self.kv_cache[1])

    def _special(
        self, x: HiddenRows, out: torch.Tensor, tokens: torch.Tensor, convolve: Convolve, scan: Scan
    ) -> None:
        """Run token rows ``tokens [n]`` (n >= 0) through projections, convolution and scan into ``out``."""
        rows, channels, N = len(x.hidden), self.D.size(0), self.ssm_state_size
        value, gate, convolved, dt, scanned = (x.hidden.new_empty(rows, channels) for _ in range(5))
        B, C = (x.hidden.new_empty(rows, N) for _ in range(2))
        if len(tokens):
            value[tokens], gate[tokens] = self.in_proj(x.hidden[tokens])[0].chunk(2, dim=-1)
        slots = slots_of(get_forward_context().attn_metadata[self.prefix])
        conv, state = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # vLLM packs some convolution weights in place for another operator, and keeps an unpacked copy.
        unpacked = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        taps = self.conv1d.weight if unpacked is None else unpacked
        convolve(
            ShortConvInputs(value, None),
            ShortConvWeights.prepare(taps.view(channels, -1), self.conv1d.bias),
            ConvolutionCaches(slots, conv),
            convolved,
        )
        if len(tokens):
            steps, B[tokens], C[tokens] = self._ssm_transform(convolved[tokens])
            dt[tokens] = steps.transpose(-2, -1)
        inputs, caches = Mamba1Inputs(convolved, dt, gate, B, C), StateCaches(slots, state)
        weights = Mamba1Weights.prepare(self.A, self._time_proj_bias(), self.D)
        scan(mamba1.choose(inputs, caches), inputs, weights, caches, scanned)
        if len(tokens):
            out[tokens] = self.out_proj(scanned[tokens])[0]

    def _records(self, runtime: HypicRuntime) -> DiagonalRecords:
        return runtime.pool.records(self.prefix, DiagonalRecords)

    def _cut(self, runtime: HypicRuntime, segments: Segments) -> list[Mamba1Carry]:
        """Return the carried data of the interiors that span passes."""
        state = self._records(runtime).state
        return self.carried(segments, lambda: Mamba1Carry.beside(state))
