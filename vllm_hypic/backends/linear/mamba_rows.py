"""Metadata of vLLM's Mamba and short convolution layers: cache slots, and the common fields of a sub-batch.

On CPU, this module sets the fields that stock code reads; on CUDA, the fields that vLLM's builder sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from ...pool.step import StepContext
from .drafted import Drafted
from .layout import StockRows


def slots_of(metadata: BaseMambaAttentionMetadata) -> torch.Tensor:
    """Return cache slots by batch row, contiguous, decodes first; with drafts, each request's first slot."""
    decodes, prefills = metadata.state_indices_tensor_d, metadata.state_indices_tensor_p
    if decodes is not None and decodes.dim() == 2:
        decodes = decodes[:, 0]
    return torch.cat([part for part in (decodes, prefills) if part is not None])


def drafted_of(metadata: BaseMambaAttentionMetadata) -> Drafted | None:
    """Return the batch if the engine drafts and requests decode in this pass, else ``None``; on CPU."""
    accepted, behind = metadata.num_accepted_tokens, metadata.state_indices_tensor_d
    decoding = metadata.num_decodes
    if accepted is None or behind is None or not decoding:
        return None
    assert metadata.query_start_loc_d is not None
    starts, resumed = metadata.query_start_loc_d.tolist(), [True] * decoding
    before = behind.gather(1, accepted[:, None].long() - 1).flatten()
    slots = before
    if metadata.num_prefills:
        assert metadata.query_start_loc_p is not None and metadata.has_initial_states_p is not None
        assert metadata.state_indices_tensor_p is not None
        starts += (metadata.query_start_loc_p[1:] + starts[-1]).tolist()
        resumed += metadata.has_initial_states_p.tolist()
        slots = torch.cat([before, metadata.state_indices_tensor_p])
    return Drafted(starts, resumed, slots, range(decoding), behind, before)


def with_slots_in_a_row(metadata: BaseMambaAttentionMetadata | None) -> None:
    """Make the prefills' slots contiguous, as stock kernels need: with draft slots, vLLM passes a column of a
    table."""
    if metadata is not None and (slots := metadata.state_indices_tensor_p) is not None:
        metadata.state_indices_tensor_p = slots.contiguous()


def _counts(rows: StockRows) -> dict[str, Any]:
    """Return the numbers of requests and tokens in decode and prefill, by the metadata's field names."""
    first = rows.starts[rows.decodes]
    return dict(
        num_prefills=len(rows.batch_rows) - rows.decodes,
        num_prefill_tokens=rows.starts[-1] - first,
        num_decodes=rows.decodes,
        num_decode_tokens=first,
        num_reqs=len(rows.batch_rows),
    )


def cpu_fields(metadata: BaseMambaAttentionMetadata, rows: StockRows, slots: torch.Tensor) -> dict[str, Any]:
    """Return the metadata fields for a sub-batch that stock code reads on CPU, by name.

    ``slots``: the slots of the sub-batch.  The caller adds the slots of decodes, in the shape that its layer
    takes."""
    decodes = rows.decodes
    return dict(
        **_counts(rows),
        has_initial_states_p=torch.tensor(rows.resumed[decodes:], dtype=torch.bool),
        query_start_loc_p=prefill_starts(rows),
        state_indices_tensor_p=slots[decodes:],
        query_start_loc_d=None,
        num_accepted_tokens=None,
        seq_lens=metadata.seq_lens[torch.tensor(rows.batch_rows)],
    )


@dataclass(frozen=True)
class MambaRows:
    """The parts of a sub-batch's metadata that do not depend on a cache; tensors on the device.

    ``batch_rows [requests]`` int64; ``decode_starts [decodes + 1]`` int32 if requests may decode with drafts,
    else ``None``.  All other fields are ``None`` without prefills: ``starts [prefills + 1]`` int32, ``resumed
    [prefills]`` bool, and three arguments of vLLM's convolution.
    """

    rows: StockRows
    batch_rows: torch.Tensor
    decode_starts: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    resumed: torch.Tensor | None = None
    nums_dict: dict[int, dict[str, Any]] | None = None
    batch_ptr: torch.Tensor | None = None
    token_chunk_offset_ptr: torch.Tensor | None = None

    @staticmethod
    def of(step: StepContext, metadata: BaseMambaAttentionMetadata, rows: StockRows) -> MambaRows:
        decodes = rows.decodes
        starts, resumed = prefill_starts(rows), np.array(rows.resumed[decodes:], dtype=np.int64)
        batch_rows, of_decodes, of_prefills, resumed_there = step.on_device(
            np.array(rows.batch_rows), np.array(rows.starts[: decodes + 1]), starts.numpy(), resumed
        )
        drafting = decodes > 0 and metadata.query_start_loc_d is not None
        decode_starts = of_decodes.int() if drafting else None
        if decodes == len(rows.batch_rows):
            return MambaRows(rows, batch_rows, decode_starts)
        convolution = compute_causal_conv1d_metadata(starts, device=step.device)
        return MambaRows(
            rows, batch_rows, decode_starts, of_prefills.int(), resumed_there.bool(), *convolution
        )

    def fields(self, metadata: BaseMambaAttentionMetadata, slots: torch.Tensor) -> dict[str, Any]:
        """Return the sub-batch's metadata fields by name.  ``slots``: ``slots_of(metadata)`` of the batch."""
        decodes, own = self.rows.decodes, slots.index_select(0, self.batch_rows)
        decoding, accepted = own[:decodes, None], None
        if self.decode_starts is not None:
            assert metadata.state_indices_tensor_d is not None and metadata.num_accepted_tokens is not None
            decoding = metadata.state_indices_tensor_d.index_select(0, self.batch_rows[:decodes])
            accepted = metadata.num_accepted_tokens.index_select(0, self.batch_rows[:decodes])
        return dict(
            **_counts(self.rows),
            has_initial_states_p=self.resumed,
            query_start_loc_p=self.starts,
            state_indices_tensor_p=own[decodes:],
            state_indices_tensor_d=decoding,
            query_start_loc_d=self.decode_starts,
            num_accepted_tokens=accepted,
            seq_lens=metadata.seq_lens.index_select(0, self.batch_rows),
            nums_dict=self.nums_dict,
            batch_ptr=self.batch_ptr,
            token_chunk_offset_ptr=self.token_chunk_offset_ptr,
        )


def prefill_starts(rows: StockRows) -> torch.Tensor:
    """Return each prefill's first row, counted from the first prefill, and the end; int32 on the host."""
    return torch.tensor(rows.starts[rows.decodes :], dtype=torch.int32) - rows.starts[rows.decodes]
