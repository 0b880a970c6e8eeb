"""A batch of all kinds of requests for a linear layer, vLLM's metadata of it and of parts of it, and the
world of such a layer: its caches, records and what is expected of it.

Stock code alone is a stand-in, which believes the metadata that it is given; layer, layout, plans and Triton
operators are the real ones.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata

from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, ordinary, pack
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import DevicePool

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
BATCHES = {"prefills": ALL, "decodes": DECODES, "drafts": DRAFTED, "drafts alone": DRAFTED_ALONE}
TABLE = torch.tensor([[4, 3, 6], [1, 8, 0]], dtype=torch.int32)
"""Slots of requests that may decode with drafts."""
ACCEPTED = torch.tensor([2, 1], dtype=torch.int32)
"""Of the first two were: what is behind the second is in another slot, and of a convolution one row further
on in the first."""
LIMIT = 2e-5
"""Largest error of outputs and states, which are about 1; everything is computed in float32."""
Metadata = TypeVar("Metadata", bound=BaseMambaAttentionMetadata)


def starts_of(lengths: Lengths) -> list[int]:
    return [0, *itertools.accumulate(n for _, n in lengths)]


def left_to_stock(lengths: Lengths) -> int:
    """Token rows: of the decodes, of the plain prefill, and stream tokens [16, 23) of the composed request,
    which lie behind the block boundary after its last point, 9."""
    return starts_of(lengths)[2] + (7 + 14 if len(lengths) == 5 else 0)


def pass_of(
    lengths: Lengths, plans: Mapping[int, StreamPlan], captures: Mapping[int, CapturePlan]
) -> StepContext:
    """A pass of these requests, of which some are composed and some are captured."""
    starts = starts_of(lengths)
    rows = [BatchRow(i, starts[i], starts[i + 1], s0, s0 + n) for i, (s0, n) in enumerate(lengths)]
    composed = [composed_row(rows[i], StreamTensors.of(plan, CPU)) for i, plan in plans.items()]
    captured = [capture_row(f"segment {plan.slot}", rows[i], plan) for i, plan in captures.items()]
    computed, scheduled = (np.array(part) for part in zip(*lengths, strict=True))
    return StepContext(composed, captured, CPU, Batch.of(computed, scheduled))


def step_of(lengths: Lengths) -> StepContext:
    """Records 0 and 1 are composed, 2 is captured."""
    points = (ComposePoint(5, 0, 4, False), ComposePoint(9, 1, 4, False))
    plan = StreamPlan(np.arange(23), 23, points, np.arange(8), np.arange(8), use_transition=True)
    capture = CapturePlan(4, 12, 2, np.arange(8), None, leading=False)
    return pass_of(lengths, {2: plan}, {3: capture})


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
    return slots, ordinary(bounds, resumed)


def wide(records: Any) -> SimpleNamespace:
    """A copy of records for a reference."""
    kept = ("conv_tail", "block_of")
    return SimpleNamespace(**{n: t.clone() if n in kept else t.double() for n, t in vars(records).items()})


class World:
    """One layer and a batch of these requests, with poisoned padding, caches and records."""

    name: str
    taps: int
    rows: str
    """The field of its inputs that holds token rows."""
    width: tuple[int, ...]
    """Of a result."""
    metadata: Any
    each_token = False
    """Stock code leaves a state for each token of a request with drafts."""
    norms_padding = False
    """Stock code writes the rows behind those that count."""
    rounds_inputs = False
    """What is cached depends, in its last bits, on the rows beside it."""

    def __init__(self, ours: type, lengths: Lengths) -> None:
        self.gen, layer = torch.Generator().manual_seed(3), ours.__new__(ours)
        self.layer: Any = layer
        nn.Module.__init__(self.layer)
        self.layer.prefix, self.layer.lengths, self.layer.stock_rows = self.name, lengths, 0
        self.layer.cache_config = SimpleNamespace(block_size=BLOCK)
        self.lengths, self.drafted = lengths, has_drafts(lengths)
        self.starts, self.step = starts_of(lengths), step_of(lengths)
        self.tokens = self.starts[-1]
        self.slots = torch.tensor(SLOTS[: len(lengths)], dtype=torch.int32)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.gen)

    def token_rows(self, *width: int) -> Tensor:
        """The batch's rows and padding."""
        rows = torch.full((self.tokens + 2, *width), math.nan)
        rows[: self.tokens] = self.normal(self.tokens, *width)
        return rows

    def fill(self, geometry: PoolGeometry, channels: int, *state: int) -> None:
        """Caches of requests that go on, and records 0 and 1."""
        kept = self.taps - 1
        caches = [torch.full((9, kept + DRAFTS * self.drafted, channels), math.nan)]
        if state:
            caches.append(torch.full((9, *state), math.nan))
        for (s0, _), slot in zip(self.lengths, SLOTS, strict=False):
            if s0:
                caches[0][slot, :kept] = self.normal(kept, channels)
                for cache in caches[1:]:
                    cache[slot] = self.normal(*state)
        if self.drafted:
            caches[0][4, kept] = self.normal(channels)
            for cache in caches[1:]:
                cache[4], cache[3] = math.nan, self.normal(*state)
        self.layer.kv_cache = tuple(caches)
        self.pool = DevicePool(geometry, CPU)
        self.records: Any = self.pool.linear[self.name]
        for part in self.records.parts:
            part.fill_(math.nan)[:2] = self.normal(2, *part.shape[1:])
        self.runtime = HypicRuntime(self.pool, dead_transition=2.0**-25)
        self.layer.connect(self.runtime)

    def call(self, out: Tensor) -> None:
        """vLLM's operator, as the compiled graph calls it."""
        raise NotImplementedError

    def caches(self, conv: Tensor, *states: Tensor) -> Any:
        """The operators' view of caches."""
        raise NotImplementedError

    def exactly(self, caches: Any, records: Any, composed: tuple[Tensor, Tensor], segments: Tensor) -> Tensor:
        """Results by the float64 references, which write caches and records."""
        raise NotImplementedError

    def run(self, step: StepContext | None) -> Tensor:
        """The rows that count."""
        self.runtime.step = step
        out = torch.zeros(self.tokens + 2, *self.width)
        with self.context(self.metadata):
            self.call(out)
        assert self.norms_padding or not out[self.tokens :].any(), "padding was written"
        return out[: self.tokens]

    def context(self, metadata: Any) -> Any:
        by_layer = None if metadata is None else dict.fromkeys(self.pool.linear, metadata)
        made = ForwardContext(
            no_compile_layers={self.name: self.layer}, attn_metadata=by_layer, slot_mapping={}
        )
        return override_forward_context(made)

    def expected(self) -> tuple[Tensor, Any, Any]:
        """Results, caches and records in float64.  Before :meth:`run`."""
        conv, *states = (cache.clone() for cache in self.layer.kv_cache)
        accepted_(self.lengths, conv, *states)
        caches = self.caches(conv[:, : self.taps - 1], *(state.double() for state in states))
        records = self.exact_records()
        return self.exactly(caches, records, *programs_of(self.lengths)), caches, records

    def exact_records(self) -> SimpleNamespace:
        return wide(self.records)

    def same(self, found: Tensor, wanted: Tensor) -> bool:
        """Of what no arithmetic changes."""
        if self.rounds_inputs:
            return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        return torch.equal(found, wanted)

    def check(self, caches: Any, records: Any) -> None:
        """Caches and records are these, and those of nobody are not written."""
        kept, each_token = self.taps - 1, self.drafted and self.each_token
        held, slots = self.caches(*self.layer.kv_cache), self.slots.long()
        whole = slots[2:] if each_token else slots
        assert self.same(held.conv[whole, :kept], caches.conv[whole])
        assert held.conv[slots[2:], kept:].isnan().all()
        for slot in slots.tolist() if len(self.layer.kv_cache) > 1 else ():
            # What the last of three tokens left is in the third slot of the request with drafts.
            found = held.state[6 if each_token and slot == 4 else slot]
            assert (found.double() - caches.state[slot]).abs().max() < LIMIT, slot
        written = {*slots.tolist(), *([3] if self.drafted else []), *([6] if each_token else [])}
        others = sorted({*range(9)} - written)
        for cache in self.layer.kv_cache:
            assert cache[others].isnan().all(), "slots of nobody were written"
        self.check_record(records)

    def check_record(self, exact: Any) -> None:
        """The captured one is the interior's."""
        assert self.same(self.records.conv_tail[2], exact.conv_tail[2])
        for part, wanted in zip(self.records.parts, vars(exact).values(), strict=False):
            assert (part[2].double() - wanted[2].double()).abs().max() < LIMIT
            assert part[3].isnan().all()
