"""Linear layers with decays under PIC on CPU: shared code of lightning attention, retention and gated linear
attention.

Per head ``S <- Diag(e^g) S + k v^T``, ``y = S^T q``; in lightning attention and retention, ``g`` is one
constant per head.  vLLM has these recurrences in Triton alone or not at all, so our operators also run plain
rows.  A record's state belongs to the positions at which a segment request computed it.  If a layer rotates
q and k, composition rotates the state's K axis to the record's place in the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.forward_context import get_forward_context

from ....pool.tensors import RetentionRecords
from ...ops import decay_attention
from ...ops.decay_attention import DecayAttentionCarry, DecayAttentionInputs, Relocation
from ...ops.linear_layer.arguments import StateCaches
from ...ops.program import ordinary
from ..base import LinearLayer
from ..layout import Composed, Segments, StockRows

if TYPE_CHECKING:
    from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


class DecayingLayer(LinearLayer[DecayAttentionInputs, DecayAttentionCarry]):
    """Mixin before a layer with one state ``[H, K, V]``: it adds capture, composition, and the recurrence of
    plain rows.  Projections, norms and rotation have produced the inputs."""

    channel_gates: ClassVar[bool] = False
    """Whether each channel of K has a separate decay, instead of each head."""
    rotary_emb: Any
    _table: torch.Tensor | None = None
    """Cosines and sines ``[positions, rotated dimensions]`` of the rotation of q and k (``rotation.py``);
    ``None`` without rotation."""

    if TYPE_CHECKING:  # vLLM's
        kv_cache: tuple[torch.Tensor, ...]

    def run_stock(self, x: DecayAttentionInputs, out: torch.Tensor) -> None:
        metadata = self._metadata()
        starts = metadata.query_start_loc[: metadata.num_decodes + metadata.num_prefills + 1].tolist()
        computed = metadata.seq_lens[: len(starts) - 1] - metadata.query_start_loc[: len(starts)].diff()
        program = ordinary(starts, [int(n > 0) for n in computed.tolist()])
        caches = self._caches()
        run = decay_attention.choose(x, caches).decay_attention_compose
        run(x, caches, out, self._no_records(), *program)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: DecayAttentionInputs,
        out: torch.Tensor,
    ) -> None:
        records = runtime.pool.records(self.prefix, RetentionRecords)
        carries = self.carried(segments, lambda: DecayAttentionCarry.beside(records))
        caches = self._caches()
        run = decay_attention.choose(x, caches).decay_attention_segments
        run(x, caches, out, records, segments.rows, carries)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: DecayAttentionInputs,
        out: torch.Tensor,
    ) -> None:
        records = runtime.pool.records(self.prefix, RetentionRecords)
        relocation = None
        if self._table is not None:
            neighbours = not self.rotary_emb.is_neox_style
            relocation = Relocation(composed.shifts, self._table, neighbours)
        caches = self._caches()
        run = decay_attention.choose(x, caches).decay_attention_compose
        run(x, caches, out, records, composed.rows, composed.ops, relocation)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> BailingLinearAttentionMetadata:
        starts = torch.tensor(rows.starts, dtype=torch.int32)
        decodes, tokens = rows.decodes, rows.starts[-1]
        slots = metadata.state_indices_tensor[torch.tensor(rows.batch_rows)]
        made: BailingLinearAttentionMetadata = replace(
            metadata,
            num_decodes=decodes,
            num_decode_tokens=rows.starts[decodes],
            num_prefills=len(rows.batch_rows) - decodes,
            num_prefill_tokens=tokens - rows.starts[decodes],
            query_start_loc=starts,
            seq_lens=torch.tensor(rows.computed, dtype=torch.int32) + starts.diff(),
            state_indices_tensor=slots,
            state_indices_tensor_d=slots[:decodes],
            state_indices_tensor_p=slots[decodes:],
        )
        return made

    def kernel_refusal(self) -> str | None:
        """Return why the C++ operators do not serve this layer, or ``None``."""
        return decay_attention.native.refuses(torch.float32, self.kv_cache[0])

    def _metadata(self) -> BailingLinearAttentionMetadata:
        found: BailingLinearAttentionMetadata = get_forward_context().attn_metadata[self.prefix]
        return found

    def _no_records(self) -> RetentionRecords:
        """Return the records of a pool without slots, for requests that read no record."""
        state = self.kv_cache[0].new_empty(0, *self.kv_cache[0].shape[1:], dtype=torch.float32)
        log = state[..., 0] if self.channel_gates else state[..., 0, 0]
        return RetentionRecords(state, log.contiguous())

    def _caches(self) -> StateCaches:
        return StateCaches(self._metadata().state_indices_tensor, self.kv_cache[0])
