"""Lightning attention under PIC on CPU: a constant decay a head, q and k rotated inside the layer.

Per head ``S <- e^{-slope} S + k v^T``, ``y = S^T q``; arXiv:2401.04658, with RoPE as MiniMax-01
(arXiv:2501.08313) has it in its attention layers.  vLLM has this recurrence in Triton alone, so ordinary
rows run ours, too.  A record's state is that of the positions at which it was computed; composing rotates its
K axis to where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.platforms import current_platform

from ....pool.families import LIGHTNING
from ....pool.tensors import RetentionRecords
from ...ops import decay_attention
from ...ops.program import ordinary
from ..base import LinearLayer
from ..layout import Composed, Segments, StockRows
from .rotation import rotating_exactly

if TYPE_CHECKING:
    from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata

    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


@dataclass(frozen=True)
class TokenRows:
    """Token rows behind projections, norms and rotation: ``q`` (scaled), ``k``, ``v [rows, H, K]`` fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> TokenRows:
        """These rows alone."""
        return TokenRows(self.q[tokens], self.k[tokens], self.v[tokens])


class HypicLightning(LinearLayer[TokenRows, decay_attention.Carry], BailingMoELinearAttention):
    """vLLM's layer plus capture and composition, and the recurrence of ordinary rows.

    Stock projections, norms, rotation and gate stay; what the layer does with the recurrence's inputs is
    ours.
    """

    family = LIGHTNING
    rotary_emb: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log_decays = -self.tp_slope.flatten().float()
        self._table: torch.Tensor | None = None
        if self.linear_rope and (exact := rotating_exactly(self.rotary_emb)) is not None:
            self.rotary_emb, self._table = exact, exact.hypic_rotations

    def _forward(self, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor) -> None:
        """Same contract as the stock method."""
        if get_forward_context().attn_metadata is None:
            self.hypic_reached = True
            output.zero_()  # vLLM's profile run; stock code leaves what happens to stand in memory
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
        """Same contract as the stock method: ``q``, ``k``, ``v [rows, H, K]`` fp32 to ``[rows, H K]``."""
        out = torch.empty(v.shape)
        self.run(TokenRows(q, k, v), out)
        return out.flatten(1)

    _decode_infer = _prefill_and_mix_infer

    def run_stock(self, x: TokenRows, out: torch.Tensor) -> None:
        metadata = self._metadata()
        starts = metadata.query_start_loc[: metadata.num_decodes + metadata.num_prefills + 1].tolist()
        computed = metadata.seq_lens[: len(starts) - 1] - metadata.query_start_loc[: len(starts)].diff()
        program = ordinary(starts, [int(n > 0) for n in computed.tolist()])
        inputs, caches = self._layer(x)
        run = decay_attention.choose(inputs, caches).decay_attention_compose
        run(inputs, caches, out, self._no_records(), *program)

    def run_segments(
        self, runtime: HypicRuntime, step: StepContext, segments: Segments, x: TokenRows, out: torch.Tensor
    ) -> None:
        records = runtime.pool.records(self.prefix, RetentionRecords)
        carries = self.carried(segments, lambda: decay_attention.Carry.beside(records))
        inputs, caches = self._layer(x)
        run = decay_attention.choose(inputs, caches).decay_attention_segments
        run(inputs, caches, out, records, segments.rows, carries)

    def run_composed(
        self, runtime: HypicRuntime, step: StepContext, composed: Composed, x: TokenRows, out: torch.Tensor
    ) -> None:
        records = runtime.pool.records(self.prefix, RetentionRecords)
        relocation = None
        if self._table is not None:
            neighbours = not self.rotary_emb.is_neox_style
            relocation = decay_attention.Relocation(composed.shifts, self._table, neighbours)
        inputs, caches = self._layer(x)
        run = decay_attention.choose(inputs, caches).decay_attention_compose
        run(inputs, caches, out, records, composed.rows, composed.ops, relocation)

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

    def refusal(self) -> str | None:
        if current_platform.is_cuda():
            return "lightning attention on GPUs (served on CPUs)"
        if self.linear_rope and self._table is None:
            kind = type(self.rotary_emb).__name__.removeprefix("Hypic")
            return f"lightning attention rotated by {kind} (its states are not moved; served: RoPE, YaRN)"
        return None

    def kernel_refusal(self) -> str | None:
        """Why the C++ operators do not serve this layer, or ``None``."""
        return decay_attention.native.refuses(torch.float32, self.kv_cache[0])

    def _metadata(self) -> BailingLinearAttentionMetadata:
        found: BailingLinearAttentionMetadata = get_forward_context().attn_metadata[self.prefix]
        return found

    def _no_records(self) -> RetentionRecords:
        """Those of a pool without slots, for requests that read none."""
        state = self.kv_cache[0].new_empty(0, *self.kv_cache[0].shape[1:], dtype=torch.float32)
        return RetentionRecords(state, state[..., 0, 0].contiguous())

    def _layer(self, x: TokenRows) -> tuple[decay_attention.Inputs, decay_attention.Caches]:
        caches = decay_attention.Caches(self._metadata().state_indices_tensor, self.kv_cache[0])
        return decay_attention.Inputs(x.q, x.k, x.v, self._log_decays), caches
