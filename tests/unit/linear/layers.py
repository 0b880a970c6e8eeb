"""What random layers of every linear family have in common: caches, records and programs, poison where
nothing may be read, and the operators as a layer calls them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack

SLOTS = 7
"""Of caches and of records."""
PAD = 3
"""Poisoned token rows before and after those of a test."""
NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode
KEPT = {"slots", "conv", "conv_tail", "block_of", "alive"}
"""Integers, and the caches and inputs of convolutions: of one dtype in every layer."""


def unwritten(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(size, torch.nan).to(dtype)


def cache(apart: int, *size: int, dtype: torch.dtype) -> Tensor:
    """An unwritten cache, strided as vLLM's are."""
    return unwritten(SLOTS, apart, *size, dtype=dtype)[:, 1]


def emptied(carry: Any) -> Any:
    for field in fields(carry):
        held = getattr(carry, field.name)
        held.fill_(torch.nan if held.is_floating_point() else -7)
    return carry


def slots() -> Tensor:
    """As vLLM has them: in an order of their own."""
    return torch.tensor([3, 0, 5, 1, 2, 4, 6], dtype=torch.int32)


def amid_poison(rows: Tensor) -> Tensor:
    rows[:PAD] = rows[-PAD:] = torch.nan
    return rows


def step_biases(gen: torch.Generator, *size: int) -> Tensor:
    """softplus^-1 of step sizes that are log-uniform in [1e-3, 1e-1], as Mamba and GDN initialise them."""
    step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(size, generator=gen))
    return step + torch.log(-torch.expm1(-step))


def relative(x: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the error over that of the exact tensor."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())


@dataclass
class World:
    """One layer's world and what ran in it; everything that nobody has written yet is NaN.

    ``weights``, ``carries``: ``None`` where the family's operators are given none.
    """

    shape: Any
    x: Any
    weights: Any
    caches: Any
    out: Tensor
    records: Any
    carries: Any

    family: ClassVar[str]
    """What its operators' names begin with."""

    def copy(self, *, exact: bool = False) -> Self:
        """`exact`: results are float64."""

        def copied(part: Any) -> Any:
            found = {f.name: getattr(part, f.name).clone() for f in fields(part)}
            wide = {name: found[name].double() for name in found.keys() - KEPT} if exact else {}
            return replace(part, **(found | wide))

        changed = {name: copied(getattr(self, name)) for name in ("caches", "records")}
        if self.carries is not None:
            changed["carries"] = [copied(carry) for carry in self.carries]
        return replace(self, **changed, out=self.out.double() if exact else self.out.clone())  # type: ignore

    def exact(self) -> Self:
        """A copy whose results are float64, as the reference needs them."""
        return self.copy(exact=True)

    def outputs(self, first: int, stop: int) -> Tensor:
        return self.out[PAD + first : PAD + stop]

    def state(self, batch_row: int) -> Tensor:
        return self.caches.state[int(self.caches.slots[batch_row])]

    def context(self, batch_row: int) -> Tensor:
        return self.caches.conv[int(self.caches.slots[batch_row])]

    def resume(self, batch_row: int) -> None:
        """As an earlier pass left the request."""
        slot, gen = int(self.caches.slots[batch_row]), torch.Generator().manual_seed(batch_row)
        for name in [f.name for f in fields(self.caches) if f.name != "slots"]:
            held = getattr(self.caches, name)
            held[slot] = torch.randn(held[slot].shape, generator=gen).to(held.dtype)

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        for held in vars(self.records).values():
            held[slot] = torch.randn(held[slot].shape, generator=gen).to(held.dtype)

    def _operator(self, module: ModuleType, name: str, *program: Any) -> None:
        given = self.x, self.weights, self.caches, self.out, self.records
        getattr(module, f"{self.family}_{name}")(*(part for part in given if part is not None), *program)

    def segments(self, module: ModuleType, rows: Tensor, *options: Any) -> None:
        """A module's operator for rows of segment requests."""
        carries = [] if self.carries is None else [self.carries]
        self._operator(module, "segments", rows, *carries, *options)

    def compose(self, module: ModuleType, rows: Tensor, ops: Tensor, shifts: Sequence[int] | None) -> None:
        """A module's operator for rows of composed requests; `shifts` of states that are moved."""
        self._operator(module, "compose", rows, ops)


def run_segments(
    module: ModuleType, layer: World, segments: Sequence[Segment], cuts: Sequence[int] = (), *options: Any
) -> None:
    """All segments at once, in passes that end at `cuts`."""
    ends = [*cuts, max(s.tokens for s in segments)]
    for start, stop in zip([0, *cuts], ends, strict=True):
        layer.segments(module, segment_program(segments, start, stop), *options)


def run_compose(
    module: ModuleType, layer: World, requests: Sequence[Composed], shifts: Sequence[int] | None = None
) -> None:
    layer.compose(module, *compose_program(requests), shifts)


@dataclass(frozen=True)
class Segment:
    """A segment request: `tokens` rows in the batch, interior [lo, hi), record in `slot`."""

    batch_row: int
    at: int
    tokens: int
    lo: int
    hi: int
    slot: int
    leading: bool = False

    def row(self, start: int, stop: int) -> SegmentRow:
        """Its row for a pass over its tokens [start, stop)."""
        begin = min(max(self.lo, start), stop)
        end = max(begin, min(self.hi, stop))
        base = PAD + self.at
        whole = begin == self.lo and end == self.hi
        return SegmentRow(
            self.batch_row,
            int(start > 0),
            base + start,
            base + stop,
            base + begin,
            base + end,
            self.slot,
            int(self.leading),
            int(begin == self.lo and begin < end),
            int(begin < end == self.hi),
            int(self.lo > 0),
            -1 if whole or self.leading or begin == end else self.batch_row,
        )


def segment_program(segments: Sequence[Segment], start: int = 0, stop: int = 1 << 30) -> Tensor:
    """All segments that have tokens in [start, stop) of their own."""
    rows = [s.row(start, min(stop, s.tokens)) for s in segments if start < s.tokens]
    return pack(rows, SegmentRow)


def packed(sizes: Sequence[int], windows: Sequence[int] = (8, 3, 0)) -> tuple[int, list[Segment]]:
    """Segments of these sizes and the tokens they take, poison between them, with `windows` before their
    interiors, in turn; the fourth is leading."""
    at, segments = 2, []
    for row, n in enumerate(sizes):
        lo = min(windows[row % len(windows)], n - 1)
        hi = n if row % 2 else max(lo + 1, n - 8)
        segments.append(Segment(row, at, n, lo, hi, slot=SLOTS - 1 - row, leading=row == 3))
        at += n + row
    return at, segments


Composed = tuple[int, bool, Sequence[tuple[int, int, int, int]]]
"""A composed request: batch row, resumed, operations (first token, tokens, slot, mode)."""


def compose_program(requests: Sequence[Composed]) -> tuple[Tensor, Tensor]:
    """Their rows and operations."""
    rows: list[ComposeRow] = []
    ops: list[ComposeOp] = []
    for batch_row, resumed, operations in requests:
        first = len(ops)
        ops += [ComposeOp(PAD + at, count, slot, mode) for at, count, slot, mode in operations]
        rows.append(ComposeRow(batch_row, int(resumed), first, len(ops)))
    return pack(rows, ComposeRow), pack(ops, ComposeOp)


def every_kind(added: int, query: int) -> tuple[int, list[Composed]]:
    """Composed requests of every kind, of records 0 to 3, and the tokens they take.

    ``added``, ``query``: tokens of the longest request's record and of its question.  Record 3 is a leading
    one.  Batch row 2 goes on from an earlier pass; no request is of batch row 3.
    """
    end = 219 + added + query
    return end + 32, [
        # leading record, seams, two records side by side, a query
        (0, False, [(0, 0, 3, REPLACE), (0, 8, 0, TRANSITION), (8, 16, 1, TRANSITION),
                    (24, 0, 0, TRANSITION), (24, 40, -1, NONE)]),
        (2, True, [(70, 1, 1, TRANSITION), (71, 2, 2, TRANSITION), (73, 33, -1, NONE)]),
        # no leading segment; ends in a record
        (1, False, [(110, 31, 0, TRANSITION), (141, 65, 1, TRANSITION), (206, 0, -1, NONE)]),
        (5, False, [(210, 9, 0, ADD), (219, added, 1, ADD), (219 + added, query, -1, NONE)]),
        (4, False, [(end + 1, 0, 0, TRANSITION), (end + 1, 1, -1, NONE)]),
        # islands: from nothing, behind a head, one after the other, and where the pass ends
        (6, False, [(end + 2, 3, -1, RESTORE), (end + 5, 0, 0, TRANSITION), (end + 5, 2, -1, NONE),
                    (end + 7, 8, -1, RESTORE), (end + 15, 1, -1, RESTORE), (end + 16, 0, 1, TRANSITION),
                    (end + 16, 4, -1, NONE), (end + 20, 10, -1, RESTORE), (end + 30, 0, -1, NONE)]),
    ]  # fmt: skip
