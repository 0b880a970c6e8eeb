"""Mamba2 under PIC on CUDA: Triton operators beside vLLM's own kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, Mamba2AttentionMetadataBuilder

from ....pool.shared import Once
from ...ops import mamba2
from ...ops.mamba2 import Mamba2Weights
from ..base import Scratch
from ..cuda import SharedPlans, warm_up_plans
from ..layout import Composed, Segments, StockRows
from ..mamba_rows import MambaRows, prefill_starts, slots_of
from .base import HypicMamba2, ProjectedRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext

_CARRIED = 2
"""Segment requests that may be between two prefill chunks at a time; more requests use vLLM's reserve."""


class HypicCUDAMamba2(HypicMamba2):
    """vLLM's CUDA layer plus capture and composition."""

    _constants: Mamba2Weights | None = None

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return the spec without the stock layer's promise that a pass keeps states of block boundaries in
        its middle.  Our operators keep none, so passes end at boundaries, as for vLLM's other layers."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        from ...ops.mamba2.triton import operators

        plan = step.shared.of(SharedPlans).segments(segments, step.device)
        inputs, heads = self.by_head(x, out)
        caches, carries = self.caches(self._slots(step)), self.cut(runtime, segments)
        operators.run_segments(plan, inputs, self._weights(), caches, heads, self.records(runtime), carries)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        from ...ops.mamba2.triton import operators

        plan = step.shared.of(SharedPlans).compose(composed, step.device)
        inputs, heads = self.by_head(x, out)
        caches = self.caches(self._slots(step))
        operators.run_compose(plan, inputs, self._weights(), caches, heads, self.records(runtime))

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Mamba2AttentionMetadata:
        """Return the metadata that vLLM's builder would make for these rows alone."""
        shared = step.shared.of(_SharedParts)
        common = shared.rows(lambda: MambaRows.of(step, metadata, rows))
        chunks = shared.chunks(lambda: _Chunks.of(step, rows, metadata.chunk_size))
        return Mamba2AttentionMetadata(
            **common.fields(metadata, step.shared.of(SharedPlans).slots(metadata, slots_of)),
            prep_initial_states=any(rows.resumed[rows.decodes :]),
            chunk_size=metadata.chunk_size,
            seq_idx_p=chunks.requests,
            cu_chunk_seqlen_p=chunks.starts,
            last_chunk_indices_p=chunks.last,
        )

    def kernel_refusal(self) -> str | None:
        """Return why the Triton operators do not serve this layer, or ``None``."""
        nowhere = torch.zeros(0, dtype=torch.int32, device=self.kv_cache[1].device)
        reason = mamba2.refuses(self._weights(), self.caches(nowhere))
        return None if reason is None else f"Mamba2 with {reason}"

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile the operators for every chunk length.

        The operators run on the cache's block 0, which vLLM reserves for padding, and on record slot 0 of an
        empty pool.
        """
        from ...ops.mamba2.triton import operators

        device, weights = self.kv_cache[1].device, self._weights()
        caches, records = self.caches(torch.zeros(1, dtype=torch.int32, device=device)), self.records(runtime)
        for n, segments, composing in warm_up_plans(device):
            # The input is a part of rows as wide as the projection, because Triton compiles per alignment.
            width = self.tped_intermediate_size + self.tped_conv_size + self.tped_dt_size
            rows = ProjectedRows(self.conv_weights.new_zeros(n, width))
            x, out = self.by_head(rows, self.conv_weights.new_empty(n, self.tped_intermediate_size))
            operators.run_segments(segments, x, weights, caches, out, records, [])
            operators.run_compose(composing, x, weights, caches, out, records)

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        carried = _CARRIED * self.tped_dt_size * self.head_dim * self.ssm_state_size * torch.float32.itemsize
        # Our operators convolve their rows.  Stock code then gets copies of its rows, and writes its results
        # to separate memory.
        inner, convolved = self.tped_intermediate_size, self.tped_conv_size
        return Scratch(rows * (2 * inner + convolved + self.tped_dt_size) * dtype.itemsize + carried, carried)

    def _slots(self, step: StepContext) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata[self.prefix]
        return step.shared.of(SharedPlans).slots(metadata, slots_of)

    def weights_changed(self) -> None:
        self._constants = None

    def _weights(self) -> Mamba2Weights:
        if self._constants is None:
            self._constants = self.weights()
        return self._constants


@dataclass
class _SharedParts:
    """The values of one pass that its layers share, besides plans."""

    rows: Once[MambaRows] = field(default_factory=Once)
    chunks: Once[_Chunks] = field(default_factory=Once)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of vLLM's scan over prefills, int32 on the device, ``None`` without prefills.

    ``starts [chunks + 1]``: first rows; ``requests [chunks]``: each chunk's request; ``last [prefills]``:
    each request's last chunk."""

    starts: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    last: torch.Tensor | None = None

    @staticmethod
    def of(step: StepContext, rows: StockRows, size: int) -> _Chunks:
        """Return the chunks of ``rows``, with ends at multiples of ``size`` tokens in each request.  The
        whole batch has the same ends, because chunk ends affect the bits of results."""
        computed = rows.computed[rows.decodes :]
        if not computed:
            return _Chunks()
        *parts, _ = Mamba2AttentionMetadataBuilder._compute_chunk_metadata(
            size, len(computed), torch.tensor(computed), prefill_starts(rows)
        )
        return _Chunks(*(async_tensor_h2d(part, dtype=torch.int32, device=step.device) for part in parts))
