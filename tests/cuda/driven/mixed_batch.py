"""A batch of all kinds of requests for a linear layer, and vLLM's metadata of it and of parts of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata

from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, pack
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row

CPU = torch.device("cpu")
BLOCK = 8
"""Tokens of a KV block: where stock code takes over again."""
Lengths = Sequence[tuple[int, int]]
ALL: Lengths = ((5, 1), (9, 1), (3, 20), (2, 11), (0, 14))
"""Of each request: tokens behind it, tokens in this pass; decodes first, as vLLM orders a batch.

Two decodes, a composed prefill that passes a block boundary, a segment request whose interior ends, a plain
prefill."""
DECODES: Lengths = ((5, 1), (9, 1), (3, 8), (2, 11))
"""Nothing is left to stock code but decodes: the composed request stays before the next block boundary."""
SLOTS = 4, 1, 7, 2, 5
DRAFTS = 2
DRAFTED: Lengths = ((5, 3), (9, 1), *ALL[2:])
"""The decodes have two drafts, and none, in an engine with so many at most."""
DRAFTED_ALONE: Lengths = ((5, 3), (9, 1), *DECODES[2:])
TABLE = torch.tensor([[4, 3, 6], [1, 8, 0]], dtype=torch.int32)
"""Slots of requests that may decode with drafts."""
ACCEPTED = torch.tensor([2, 1], dtype=torch.int32)
"""Of the first two were: what is behind the second is in another slot, and of a convolution one row further
on in the first."""
LEFT_TO_STOCK = 2 + 7 + 14
"""Token rows of `ALL`: stream tokens [16, 23) of the composed request lie behind the boundary after its last
point, 9."""
Metadata = TypeVar("Metadata", bound=BaseMambaAttentionMetadata)


def starts_of(lengths: Lengths) -> list[int]:
    return [0, *itertools.accumulate(n for _, n in lengths)]


def step_of(lengths: Lengths) -> StepContext:
    """Records 0 and 1 are composed, 2 is captured."""
    starts = starts_of(lengths)
    points = (ComposePoint(5, 0, 4, False), ComposePoint(9, 1, 4, False))
    plan = StreamPlan(np.arange(23), 23, points, np.arange(8), np.arange(8), use_transition=True)
    capture = CapturePlan(4, 12, 2, np.arange(8), None, leading=False)
    at = [BatchRow(i, starts[i], starts[i + 1], s0, s0 + n) for i, (s0, n) in enumerate(lengths)]
    computed, scheduled = (np.array(part) for part in zip(*lengths, strict=True))
    return StepContext(
        [composed_row(at[2], StreamTensors.of(plan, CPU))],
        [capture_row("segment", at[3], capture)],
        CPU,
        Batch.of(computed, scheduled),
    )


def programs_of(lengths: Lengths) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """All requests as programs for a reference: one of composed requests, stock code's among them, and one of
    segments.  The composed request is one walk, whatever block boundary it passes."""
    starts = starts_of(lengths)
    first, stop = starts[2], starts[3]
    ops = [
        ComposeOp(first, 2, 0, Mode.TRANSITION),
        ComposeOp(first + 2, 4, 1, Mode.TRANSITION),
        ComposeOp(first + 6, stop - first - 6, -1, Mode.NONE),
    ]
    rows = [ComposeRow(2, 1, 0, 3)]
    for i in (0, 1, 4)[: len(lengths) - 2]:
        rows.append(ComposeRow(i, int(lengths[i][0] > 0), len(ops), len(ops) + 1))
        ops.append(ComposeOp(starts[i], lengths[i][1], -1, Mode.NONE))
    (segments,) = linear_step(step_of(lengths), BLOCK).segments
    return (pack(rows, ComposeRow), pack(ops, ComposeOp)), segments.rows


def metadata_of(kind: type[Metadata], lengths: Lengths, **more: Any) -> Metadata:
    """The whole batch's, as far as our layers look at it."""
    starts, slots = starts_of(lengths), torch.tensor(SLOTS[: len(lengths)], dtype=torch.int32)
    drafted = has_drafts(lengths)
    table = torch.stack([slots, slots * 0], 1)  # whose columns vLLM gives
    return kind(
        num_prefills=len(lengths) - 2,
        num_prefill_tokens=starts[-1] - starts[2],
        num_decodes=2,
        num_decode_tokens=starts[2],
        num_reqs=len(lengths),
        has_initial_states_p=torch.tensor([s0 > 0 for s0, _ in lengths[2:]]),
        query_start_loc_p=torch.tensor(starts[2:], dtype=torch.int32) - starts[2],
        state_indices_tensor_p=table[2:, 0],
        state_indices_tensor_d=TABLE if drafted else table[:2, :1],
        query_start_loc_d=torch.tensor(starts[:3], dtype=torch.int32) if drafted else None,
        num_accepted_tokens=ACCEPTED if drafted else None,
        seq_lens=torch.tensor([s0 + n for s0, n in lengths], dtype=torch.int32),
        **more,
    )


def has_drafts(lengths: Lengths) -> bool:
    return lengths[:2] == DRAFTED[:2]


def accepted_(lengths: Lengths, conv: Tensor, *states: Tensor) -> None:
    """Have each request's first slot of these caches hold what the last token that was accepted left."""
    if has_drafts(lengths):
        for slots, last in zip(TABLE.tolist(), (ACCEPTED - 1).tolist(), strict=True):
            conv[slots[0]] = torch.cat([conv[slots[0], last:], conv[slots[0], :last]])
            for state in states:
                state[slots[0]] = state[slots[last]]


def described(m: BaseMambaAttentionMetadata, lengths: Lengths) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Slots of what the metadata describes and its program for a reference; checks that it is consistent.

    Requests of `lengths` are told apart by their lengths.
    """
    decodes = m.num_decodes
    assert m.num_reqs == decodes + m.num_prefills == len(m.seq_lens)
    assert m.state_indices_tensor_d is not None and m.state_indices_tensor_p is not None
    if has_drafts(lengths):
        assert decodes == 2 and m.query_start_loc_d is not None and m.num_accepted_tokens is not None
        assert m.query_start_loc_d.dtype == torch.int32 and m.num_accepted_tokens.equal(ACCEPTED)
        assert m.state_indices_tensor_d.equal(TABLE)
        bounds = m.query_start_loc_d.tolist()
    else:
        assert m.query_start_loc_d is m.num_accepted_tokens is None
        assert m.state_indices_tensor_d.shape == (decodes, 1)
        bounds = [*range(decodes + 1)]
    assert bounds[-1] == m.num_decode_tokens
    slots = torch.cat([m.state_indices_tensor_d[:, 0], m.state_indices_tensor_p])
    slot_of = {s0 + n: slot for (s0, n), slot in zip(lengths, SLOTS, strict=False)}
    assert len(slot_of) == len(lengths)
    assert slots.dtype == torch.int32 and slots.tolist() == [slot_of[n] for n in m.seq_lens.tolist()]
    resumed = [True] * decodes
    if m.num_prefills:
        assert m.query_start_loc_p is not None and m.has_initial_states_p is not None
        assert m.query_start_loc_p.dtype == torch.int32 and m.has_initial_states_p.dtype == torch.bool
        starts = m.query_start_loc_p.tolist()
        bounds += [bounds[-1] + at for at in starts[1:]]
        resumed += m.has_initial_states_p.tolist()
        spans = [hi - lo for lo, hi in itertools.pairwise(starts)]
        pieces = [i for i, n in enumerate(spans) for _ in range(-(-n // 8))]
        assert m.nums_dict is not None and m.batch_ptr is not None and m.token_chunk_offset_ptr is not None
        assert m.batch_ptr[: len(pieces)].tolist() == pieces
    else:
        assert m.query_start_loc_p is m.has_initial_states_p is m.nums_dict is m.batch_ptr is None
    assert bounds[-1] == m.num_decode_tokens + m.num_prefill_tokens
    ops = [ComposeOp(lo, hi - lo, -1, Mode.NONE) for lo, hi in itertools.pairwise(bounds)]
    rows = [ComposeRow(i, int(r), i, i + 1) for i, r in enumerate(resumed)]
    return slots, (pack(rows, ComposeRow), pack(ops, ComposeOp))
