"""Mamba2 under PIC on CUDA: Triton operators beside vLLM's own kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from ....pool.shared import Once
from ...ops import mamba2
from ..base import Scratch
from ..cuda import SharedPlans, warm_up_plans
from ..layout import Composed, Segments, StockRows
from .base import HypicMamba2, ProjectedRows, slots_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext

_CARRIED = 2
"""Segment requests that are between two prefill chunks at a time; more take of vLLM's reserve."""


class HypicCUDAMamba2(HypicMamba2):
    """vLLM's CUDA layer plus capture and composition."""

    _constants: mamba2.Weights | None = None

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Without the stock layer's promise that a pass leaves the states of block boundaries in its middle,
        which our operators do not: passes end at boundaries, as those of vLLM's other layers do."""
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
        """Metadata as vLLM's builder would make it of these rows alone."""
        parts = step.shared.of(_SharedParts).sub_batch(lambda: _SubBatch.of(step, rows, metadata.chunk_size))
        slots = step.shared.of(SharedPlans).slots(metadata, slots_of).index_select(0, parts.batch_rows)
        decodes, prefills = rows.decodes, len(rows.batch_rows) - rows.decodes
        first, tokens = rows.starts[decodes], rows.starts[-1]
        return Mamba2AttentionMetadata(
            num_prefills=prefills,
            num_prefill_tokens=tokens - first,
            num_decodes=decodes,
            num_decode_tokens=first,
            num_reqs=len(rows.batch_rows),
            has_initial_states_p=parts.resumed,
            query_start_loc_p=parts.starts,
            state_indices_tensor_p=slots[decodes:],
            state_indices_tensor_d=slots[:decodes, None],
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=metadata.seq_lens.index_select(0, parts.batch_rows),
            prep_initial_states=any(rows.resumed[decodes:]),
            chunk_size=metadata.chunk_size,
            seq_idx_p=parts.chunk_requests,
            cu_chunk_seqlen_p=parts.chunk_starts,
            last_chunk_indices_p=parts.last_chunks,
            nums_dict=parts.nums_dict,
            batch_ptr=parts.batch_ptr,
            token_chunk_offset_ptr=parts.token_chunk_offset_ptr,
        )

    def kernel_refusal(self) -> str | None:
        """Why the Triton operators do not serve this layer, or ``None``."""
        nowhere = torch.zeros(0, dtype=torch.int32, device=self.kv_cache[1].device)
        reason = mamba2.refuses(self._weights(), self.caches(nowhere))
        return None if reason is None else f"Mamba2 with {reason}"

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile the operators for every length of chunk.

        Runs on the cache's block 0, which vLLM keeps for padding, and on the record slot 0 of a pool that
        holds nothing yet.
        """
        from ...ops.mamba2.triton import operators

        device, weights = self.kv_cache[1].device, self._weights()
        caches, records = self.caches(torch.zeros(1, dtype=torch.int32, device=device)), self.records(runtime)
        for n, segments, composing in warm_up_plans(device):
            # A part of rows as wide as the projection's: how they are aligned decides what is compiled.
            width = self.tped_intermediate_size + self.tped_conv_size + self.tped_dt_size
            rows = ProjectedRows(self.conv_weights.new_zeros(n, width))
            x, out = self.by_head(rows, self.conv_weights.new_empty(n, self.tped_intermediate_size))
            operators.run_segments(segments, x, weights, caches, out, records, [])
            operators.run_compose(composing, x, weights, caches, out, records)

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        carried = _CARRIED * self.tped_dt_size * self.head_dim * self.ssm_state_size * torch.float32.itemsize
        return Scratch(rows * self.tped_conv_size * dtype.itemsize + carried, carried)

    def _slots(self, step: StepContext) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata[self.prefix]
        return step.shared.of(SharedPlans).slots(metadata, slots_of)

    def _weights(self) -> mamba2.Weights:
        if self._constants is None:
            self._constants = self.weights()
        return self._constants


@dataclass
class _SharedParts:
    sub_batch: Once[_SubBatch] = field(default_factory=Once)


@dataclass(frozen=True)
class _SubBatch:
    """The parts of a sub-batch's metadata that no cache has a say in; tensors on the device.

    ``batch_rows [requests]`` int64; what concerns prefills alone is ``None`` without any: ``starts [prefills
    + 1]`` int32, ``resumed [prefills]``, ``chunk_starts [chunks + 1]`` int32, ``chunk_requests [chunks]``
    int32 and ``last_chunks [prefills]`` int32, and what vLLM's convolution takes.
    """

    batch_rows: torch.Tensor
    starts: torch.Tensor | None = None
    resumed: torch.Tensor | None = None
    chunk_starts: torch.Tensor | None = None
    chunk_requests: torch.Tensor | None = None
    last_chunks: torch.Tensor | None = None
    nums_dict: dict[int, dict[str, Any]] | None = None
    batch_ptr: torch.Tensor | None = None
    token_chunk_offset_ptr: torch.Tensor | None = None

    @staticmethod
    def of(step: StepContext, rows: StockRows, chunk_size: int) -> _SubBatch:
        prefills = len(rows.batch_rows) - rows.decodes
        if not prefills:
            return _SubBatch(*step.on_device(np.array(rows.batch_rows)))
        starts = torch.tensor(rows.starts[rows.decodes :], dtype=torch.int32) - rows.starts[rows.decodes]
        computed = rows.computed[rows.decodes :]
        # Chunks end at multiples of their size in the request, as in the whole batch: that decides bits.
        *chunks, _ = Mamba2AttentionMetadataBuilder._compute_chunk_metadata(
            chunk_size, prefills, torch.tensor(computed), starts
        )
        batch_rows, starts_there, resumed = step.on_device(
            np.array(rows.batch_rows), starts.numpy(), np.array(computed) > 0
        )
        return _SubBatch(
            batch_rows,
            starts_there.int(),
            resumed.bool(),
            *(async_tensor_h2d(part, dtype=torch.int32, device=step.device) for part in chunks),
            *compute_causal_conv1d_metadata(starts, device=step.device),
        )
