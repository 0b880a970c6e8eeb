"""Metadata that vLLM's Mamba and short convolution layers have in common: their slots, and fields of a
sub-batch: on CPU as far as stock code reads them, on CUDA what the builder would make."""

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
    """Cache slots by batch row, contiguous: decodes come first; with drafts, the first of several."""
    decodes, prefills = metadata.state_indices_tensor_d, metadata.state_indices_tensor_p
    if decodes is not None and decodes.dim() == 2:
        decodes = decodes[:, 0]
    return torch.cat([part for part in (decodes, prefills) if part is not None])


def drafted_of(metadata: BaseMambaAttentionMetadata) -> Drafted | None:
    """The batch, if requests decode in it in an engine that drafts; on CPU."""
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
    """Have stock kernels find slots one behind the other: where requests have some for drafts, too, vLLM
    gives a column of their table."""
    if metadata is not None and (slots := metadata.state_indices_tensor_p) is not None:
        metadata.state_indices_tensor_p = slots.contiguous()


def _counts(rows: StockRows) -> dict[str, Any]:
    """How many requests and tokens of a sub-batch decode and are prefilled, by the metadata's names."""
    first = rows.starts[rows.decodes]
    return dict(
        num_prefills=len(rows.batch_rows) - rows.decodes,
        num_prefill_tokens=rows.starts[-1] - first,
        num_decodes=rows.decodes,
        num_decode_tokens=first,
        num_reqs=len(rows.batch_rows),
    )


def cpu_fields(metadata: BaseMambaAttentionMetadata, rows: StockRows, slots: torch.Tensor) -> dict[str, Any]:
    """Fields of the metadata of these rows, by name, as far as stock code reads it on CPU; the rest is vLLM's
    defaults.  ``slots``: the rows' own.  Those of decodes are left out: layers take them in several forms."""
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
    """What no cache has a say in; tensors on the device.

    ``batch_rows [requests]`` int64; ``decode_starts [decodes + 1]`` int32 where requests may decode with
    drafts, else ``None``; what concerns prefills alone is ``None`` without any: ``starts [prefills + 1]``
    int32, ``resumed [prefills]``, and what vLLM's convolution takes.
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
        """Fields of the sub-batch's metadata by name.  ``slots``: ``slots_of(metadata)`` of the batch."""
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
    """First row of each prefill among theirs, and behind the last, int32 on the host."""
    return torch.tensor(rows.starts[rows.decodes :], dtype=torch.int32) - rows.starts[rows.decodes]
