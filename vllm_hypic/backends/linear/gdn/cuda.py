"""Gated DeltaNet under PIC on CUDA: Triton operators beside vLLM's own kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets
from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from ....pool.shared import Once
from ...ops import gated_delta
from ...ops.gated_delta import GatedDeltaInputs
from ...ops.linear_layer.arguments import LayerCaches
from ..base import Scratch
from ..cuda import AtOnce, SharedPlans, warm_up_plans
from ..layout import Composed, Segments, StockRows
from .base import DeltaNet, HypicGatedDeltaNet

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext

SUMMARY_BYTES = 256 << 20
"""Most bytes of interiors' summaries in a layer at once; later turns run the rest of a pass's segments."""
UNFILLED_BYTES = 64 << 20
"""Most bytes of the rows that the last chunks of stretches lack; later turns run the rest of the requests."""


@dataclass
class _SharedParts:
    """The values of one pass that its layers share, besides plans."""

    sub_batch: Once[_SubBatch] = field(default_factory=Once)


class CUDADeltaNet(DeltaNet):
    """Mixin before a layer of vLLM: capture and composition on CUDA."""

    _views: _Views | None = None

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: GatedDeltaInputs,
        out: torch.Tensor,
    ) -> None:
        from ...ops.gated_delta.triton import operators

        plans = step.shared.of(SharedPlans).segment_parts(segments, step.device, self._at_once())
        views, records = self._current_views(), self.records(runtime)
        caches, carries = views.caches(self._slots(step)), self.cut(runtime, segments)
        dead = runtime.dead_transition
        for plan in plans:
            operators.run_segments(plan, x, views.weights, caches, out, records, carries, dead)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: GatedDeltaInputs,
        out: torch.Tensor,
    ) -> None:
        from ...ops.gated_delta.triton import operators

        most = AtOnce(unfilled=self._at_once().unfilled)  # composed requests have no summaries
        plans = step.shared.of(SharedPlans).compose_parts(composed, step.device, most)
        views, records = self._current_views(), self.records(runtime)
        caches = views.caches(self._slots(step))
        for plan in plans:
            operators.run_compose(plan, x, views.weights, caches, out, records)

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        """Return the bytes for passes of at most ``rows`` token rows.  Working memory includes rows that last
        chunks lack, and summaries of interiors, which the operators keep while these run."""
        from ...ops.linear_layer.triton.plan import CHUNKS

        own, most = super().scratch(rows, dtype), self._at_once()
        unfilled = min(rows * (CHUNKS[-1] - 1), most.unfilled) * self.terms_bytes()
        summaries = min(rows, most.requests) * self._summary_bytes()
        return own._replace(working=own.working + unfilled + summaries)

    def _at_once(self) -> AtOnce:
        return AtOnce(self._segments_at_once(), UNFILLED_BYTES // self.terms_bytes())

    def _segments_at_once(self) -> int:
        return max(1, SUMMARY_BYTES // self._summary_bytes())

    def _summary_bytes(self) -> int:
        """Return the bytes of one interior's summary: S before and after the interior, and T, in float32."""
        heads, K, V = self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim
        return heads * ((2 * V + K) * K + 1) * torch.float32.itemsize

    def _slots(self, step: StepContext) -> torch.Tensor:
        """Return cache slots by batch row, contiguous, as vLLM may pass a column of a table."""
        metadata = get_forward_context().attn_metadata[self.prefix]
        return self._slots_of(step, metadata)

    def _slots_of(self, step: StepContext, metadata: GDNAttentionMetadata) -> torch.Tensor:
        slots, drafting = metadata.non_spec_state_indices_tensor, metadata.spec_sequence_masks_cpu
        assert slots is not None

        def by_batch_row(of: GDNAttentionMetadata) -> torch.Tensor:
            if drafting is None:
                return slots.contiguous()
            # Stock code alone runs requests that decode with drafts, so no operator reads their slots here.
            others = (~drafting[: self.requests(of)]).numpy().nonzero()[0]
            (rows,) = step.on_device(others)
            return slots.new_zeros(self.requests(of)).index_copy_(0, rows, slots[: len(others)])

        return step.shared.of(SharedPlans).slots(metadata, by_batch_row)

    def requests(self, metadata: GDNAttentionMetadata) -> int:
        return super().requests(metadata) + metadata.num_spec_decodes

    def sub_batch(
        self, step: StepContext, metadata: GDNAttentionMetadata, rows: StockRows
    ) -> GDNAttentionMetadata:
        """Return the metadata that vLLM's builder would make for these rows alone.

        ``rows`` has all requests that decode with drafts, in order, so their fields stay unchanged.  Raises
        ``RuntimeError`` if ``rows`` lacks such a request.
        """
        masks = metadata.spec_sequence_masks_cpu
        shared = step.shared.of(_SharedParts).sub_batch(lambda: _SubBatch.of(step, rows, masks))
        if shared.drafting != metadata.num_spec_decodes:
            raise RuntimeError(
                f"{metadata.num_spec_decodes} requests decode with drafts, but the rows hold only "
                f"{shared.drafting} of these requests"
            )
        decodes, prefills = shared.decodes, shared.prefills
        own = None
        if decodes or prefills:
            own = self._slots_of(step, metadata).index_select(0, shared.batch_rows)
        return replace(
            metadata,
            num_decodes=decodes,
            num_decode_tokens=shared.decode_tokens,
            num_prefills=prefills,
            num_prefill_tokens=shared.prefill_tokens,
            num_actual_tokens=shared.tokens,
            non_spec_query_start_loc=shared.starts,
            non_spec_state_indices_tensor=own,
            has_initial_state=shared.resumed,
            chunk_indices=shared.chunk_indices,
            chunk_offsets=shared.chunk_offsets,
            prefill_query_start_loc=shared.prefill_starts,
            prefill_state_indices=own[decodes:] if own is not None and prefills else None,
            prefill_has_initial_state=None if shared.resumed is None else shared.resumed[decodes:],
            spec_sequence_masks=shared.masks,
            spec_sequence_masks_cpu=shared.masks_cpu,
            spec_token_indx=shared.drafting_tokens,
            non_spec_token_indx=shared.other_tokens,
            nums_dict=shared.nums_dict,
            batch_ptr=shared.batch_ptr,
            token_chunk_offset_ptr=shared.token_chunk_offset_ptr,
        )

    def kernel_refusal(self) -> str | None:
        """Return why the Triton operators do not serve this layer, or ``None``."""
        views = self._current_views()
        nowhere = torch.zeros(0, dtype=torch.int32, device=views.state.device)
        reason = gated_delta.refuses(views.weights, views.caches(nowhere))
        return None if reason is None else f"gated delta net with {reason}"

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile the operators for every chunk length.

        The operators run on the cache's block 0, which vLLM reserves for padding, and on record slot 0 of an
        empty pool.
        """
        from ...ops.gated_delta.triton import operators

        views, records = self._current_views(), self.records(runtime)
        conv, device = views.conv, views.state.device
        caches = views.caches(torch.zeros(1, dtype=torch.int32, device=device))
        heads, K, V = views.state.shape[1:]
        for n, segments, composing in warm_up_plans(device):
            mixed, b = conv.new_zeros(n, conv.size(2)), conv.new_zeros(n, heads)
            a = conv.new_zeros(n, heads, K) if self.channel_gates else b
            x, out = GatedDeltaInputs(mixed, a, b), conv.new_empty(n, heads, V)
            runtime.pool.transition_blocks.offer(0)
            operators.run_segments(
                segments, x, views.weights, caches, out, records, [], runtime.dead_transition
            )
            operators.run_compose(composing, x, views.weights, caches, out, records)
        runtime.pool.transition_blocks.release([0])

    def weights_changed(self) -> None:
        self._views = None

    def _current_views(self) -> _Views:
        if self._views is None or self._views.of is not self.kv_cache[0]:
            self._views = _Views(self)
        return self._views


class HypicCUDAGatedDeltaNet(CUDADeltaNet, HypicGatedDeltaNet):
    """vLLM's CUDA layer plus capture and composition.

    vLLM's custom operator looks the layer up by name and calls its ``_forward_core``.  So the compiled graph
    is stock vLLM's, and the plugin replaces that method alone.
    """

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Run the recurrence into ``core_attn_out``, with the contract of the stock method."""
        self.core(mixed_qkv, b, a, core_attn_out)

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: torch.Tensor, ba: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Run the stock method, which another custom operator calls in engines with drafts.

        The stock method itself runs passes in which all requests decode with drafts, without rows for our
        operators.  For all other passes, it calls ``_forward_core``."""
        if not self.hypic_reached:  # without metadata, the stock method does not call `_forward_core`
            self.hypic_reached = True
        super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)

    def stock_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor
    ) -> None:
        QwenGatedDeltaNetAttention._forward_core(self, mixed_qkv, b, a, core)


class _Views:
    """A layer's constants and caches in the form of our operators."""

    def __init__(self, layer: CUDADeltaNet) -> None:
        conv, state = layer.kv_cache
        self.of = conv
        self.weights = layer.weights()
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # [slots, k - 1, dim]; stock code keeps the inputs of drafts after these rows.
        self.conv = conv[:, : len(self.weights.weight) - 1]
        self.state = state.transpose(2, 3)  # vLLM's is [slots, Hv, V, K]

    def caches(self, slots: torch.Tensor) -> LayerCaches:
        return LayerCaches(slots, self.conv, self.state)


@dataclass(frozen=True)
class _SubBatch:
    """The parts of a sub-batch's metadata that do not depend on a cache; tensors on the device.

    ``batch_rows [requests]`` int64, ``starts [requests + 1]`` int32 and ``resumed [requests]`` cover all
    requests except drafting requests, which decode with drafts.  Fields of prefills are ``None`` without
    prefills.  ``drafting``: number of drafting requests; ``masks``: whether each request drafts;
    ``drafting_tokens``, ``other_tokens``: token rows of these requests and of the rest.
    """

    batch_rows: torch.Tensor
    decodes: int
    prefills: int
    decode_tokens: int
    prefill_tokens: int
    tokens: int
    starts: torch.Tensor | None
    resumed: torch.Tensor | None = None
    prefill_starts: torch.Tensor | None = None
    chunk_indices: torch.Tensor | None = None
    chunk_offsets: torch.Tensor | None = None
    nums_dict: dict[int, dict[str, Any]] | None = None
    batch_ptr: torch.Tensor | None = None
    token_chunk_offset_ptr: torch.Tensor | None = None
    drafting: int = 0
    masks: torch.Tensor | None = None
    masks_cpu: torch.Tensor | None = None
    drafting_tokens: torch.Tensor | None = None
    other_tokens: torch.Tensor | None = None

    @staticmethod
    def of(step: StepContext, rows: StockRows, masks: torch.Tensor | None) -> _SubBatch:
        """Return the parts for ``rows``.  ``masks [batch rows]``: whether each request of the whole batch
        decodes with drafts; ``None`` without drafts."""
        if masks is None:
            return _SubBatch._without_drafts(step, rows)
        mask = masks[rows.batch_rows]
        drafting, lengths = mask.numpy(), np.diff(rows.starts)
        token_mask = np.repeat(drafting, lengths)
        of_drafts, others = token_mask.nonzero()[0], (~token_mask).nonzero()[0]
        mask_there, *tokens = step.on_device(drafting.astype(np.int64), of_drafts, others)
        left = [i for i in range(len(drafting)) if not drafting[i]]
        alone = StockRows(
            0,
            rows.tokens,
            [0, *np.cumsum(lengths[left]).tolist()],
            [rows.batch_rows[i] for i in left],
            [rows.computed[i] for i in left],
        )
        made = _SubBatch._without_drafts(step, alone)
        if not left:  # vLLM's builder makes the same difference
            tokens, made = [part.int() for part in tokens], replace(made, starts=None)
        return replace(
            made,
            tokens=rows.starts[-1],
            drafting=int(drafting.sum()),
            masks=mask_there.bool(),
            masks_cpu=mask,
            drafting_tokens=tokens[0],
            other_tokens=tokens[1],
        )

    @staticmethod
    def _without_drafts(step: StepContext, rows: StockRows) -> _SubBatch:
        decodes, decode_tokens, tokens = rows.decodes, rows.starts[rows.decodes], rows.starts[-1]
        prefills = len(rows.batch_rows) - decodes
        batch_rows, starts, resumed = step.on_device(
            np.array(rows.batch_rows, dtype=np.int64),
            np.array(rows.starts),
            np.array(rows.resumed, dtype=np.int64),
        )
        starts = starts.int()
        made = _SubBatch(batch_rows, decodes, prefills, decode_tokens, tokens - decode_tokens, tokens, starts)
        if not prefills:
            return made
        whole = torch.tensor(rows.starts, dtype=torch.int32)
        own = whole[decodes:] - decode_tokens
        chunks = prepare_chunk_indices(own, FLA_CHUNK_SIZE), prepare_chunk_offsets(own, FLA_CHUNK_SIZE)
        indices, offsets = (async_tensor_h2d(chunk, device=step.device) for chunk in chunks)
        nums_dict, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(whole, device=step.device)
        return replace(
            made,
            resumed=resumed.bool(),
            prefill_starts=starts[decodes:] - decode_tokens,
            chunk_indices=indices,
            chunk_offsets=offsets,
            nums_dict=nums_dict,
            batch_ptr=batch_ptr,
            token_chunk_offset_ptr=offset_ptr,
        )
