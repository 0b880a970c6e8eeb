"""Mamba2 under PIC on CPU: C++ operators, or PyTorch where they do not serve.

vLLM's custom operator looks the layer up by name and calls its ``conv_ssm_forward``, so the compiled graph is
stock vLLM's and only that method is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, compute_varlen_chunk_metadata

from ....pool.families import MAMBA2
from ....pool.tensors import DecayRecords
from ...ops import mamba2
from ..base import LinearLayer
from ..layout import Composed, Segments, StockRows

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


@dataclass(frozen=True)
class ProjectedRows:
    """Token rows behind the layer's projection: ``projected [rows, inner + channels + H]``, of a gate, what
    is convolved, and a step a head."""

    projected: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> ProjectedRows:
        """These rows alone."""
        return ProjectedRows(self.projected[tokens])


class HypicCPUMamba2(LinearLayer[ProjectedRows, mamba2.Carry], MambaMixer2):
    """vLLM's CPU layer plus capture and composition.

    Gate, norm and output projection come behind the operator, in stock code.
    """

    family = MAMBA2

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Same contract as the stock method."""
        if get_forward_context().attn_metadata is None:
            # A profile run or a probe: stock code leaves what happens to stand there, which may be NaN.
            output.zero_()
        self.run(ProjectedRows(projected_states), output)

    def run_stock(self, x: ProjectedRows, out: torch.Tensor) -> None:
        MambaMixer2.conv_ssm_forward(self, x.projected, out)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        inputs, weights, caches, heads, records = self._layer(runtime, x, out)
        carries = self.carried(segments, lambda: mamba2.Carry.beside(records.state))
        ops = mamba2.choose(weights, caches)
        ops.mamba2_segments(inputs, weights, caches, heads, records, segments.rows, carries)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        inputs, weights, caches, heads, records = self._layer(runtime, x, out)
        ops = mamba2.choose(weights, caches)
        ops.mamba2_compose(inputs, weights, caches, heads, records, composed.rows, composed.ops)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Mamba2AttentionMetadata:
        """Metadata of these rows as far as stock code reads it on CPU; the rest is vLLM's defaults.

        Chunks must be there, but the CPU's scan goes from row to row: where they end changes nothing.
        """
        slots = _slots(metadata)[torch.tensor(rows.batch_rows)]
        decodes, tokens = rows.decodes, rows.starts[-1]
        first = rows.starts[decodes]
        starts = torch.tensor(rows.starts[decodes:], dtype=torch.int32) - first
        chunk_ends, last_chunks, chunks = compute_varlen_chunk_metadata(starts, metadata.chunk_size)
        return Mamba2AttentionMetadata(
            num_prefills=len(rows.batch_rows) - decodes,
            num_prefill_tokens=tokens - first,
            num_decodes=decodes,
            num_decode_tokens=first,
            num_reqs=len(rows.batch_rows),
            has_initial_states_p=torch.tensor(rows.resumed[decodes:], dtype=torch.bool),
            query_start_loc_p=starts,
            state_indices_tensor_p=slots[decodes:],
            state_indices_tensor_d=slots[:decodes, None],
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=metadata.seq_lens[torch.tensor(rows.batch_rows)],
            prep_initial_states=any(rows.resumed[decodes:]),
            chunk_size=metadata.chunk_size,
            seq_idx_p=chunks,
            cu_chunk_seqlen_p=chunk_ends,
            last_chunk_indices_p=last_chunks,
        )

    def kernel_refusal(self) -> str | None:
        """Why the C++ operators do not serve this layer, or ``None``."""
        nowhere = torch.zeros(0, dtype=torch.int32)
        return mamba2.refuses(self._weights(), self._caches(nowhere))

    def _layer(
        self, runtime: HypicRuntime, x: ProjectedRows, out: torch.Tensor
    ) -> tuple[mamba2.Inputs, mamba2.Weights, mamba2.Caches, torch.Tensor, DecayRecords]:
        """What the operators take, ``out [rows, H * P]`` by head."""
        _, mixed, dt = x.projected.split(
            [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        caches = self._caches(_slots(get_forward_context().attn_metadata[self.prefix]))
        heads = out.view(len(out), -1, self.head_dim)
        records = runtime.pool.records(self.prefix, DecayRecords)
        return mamba2.Inputs(mixed, dt), self._weights(), caches, heads, records

    def _caches(self, slots: torch.Tensor) -> mamba2.Caches:
        conv, state = self.kv_cache
        return mamba2.Caches(slots, conv.transpose(1, 2) if is_conv_state_dim_first() else conv, state)

    def _weights(self) -> mamba2.Weights:
        groups = self.n_groups // self.tp_size
        return mamba2.Weights.prepare(
            self.conv_weights, self.conv1d.bias, self.A, self.dt_bias, self.D, groups
        )


def _slots(metadata: Mamba2AttentionMetadata) -> torch.Tensor:
    """Cache slots by batch row: decodes come first."""
    parts = metadata.state_indices_tensor_d, metadata.state_indices_tensor_p
    return torch.cat([part.flatten() for part in parts if part is not None])
