"""Index tensors of one forward pass for linear layers with a causal convolution.

All linear layers of a step share them.  Rows that need more than stock code are laid into one
*extended* sequence, in which every convolution input stands just where the right context wants it:

    [k-1 carried rows | chunk | k-1 rows of a record's conv tail | chunk | ... | next request ...]

so that one convolution over it serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from ...connector.step import CaptureRow, ComposedRow, StepContext


@dataclass(frozen=True)
class Chunk:
    """Run a chunk from the current state: number ``index`` of the inner chunks, or of the requests'
    last ones, which come after all inner chunks."""

    index: int
    last: bool


@dataclass(frozen=True)
class Compose:
    """Apply the record in ``slot`` to the current state."""

    slot: int
    use_transition: bool
    replace_state: bool


@dataclass(frozen=True)
class ComposedOps:
    """What happens to one composed request's state in this pass, in order.

    ``carried``: index of its carried conv context; ``batch_row``: its row in the batch; ``resumed``: it
    has a state from an earlier pass.
    """

    batch_row: int
    resumed: bool
    ops: tuple[Chunk | Compose, ...]


@dataclass(frozen=True)
class Rest:
    """Token rows ``[first, stop)`` of a composed request that stock code runs again, from the state that
    the composed chunks left: all from the first block boundary after the last compose point on.

    A later turn that finds these blocks in vLLM's prefix cache runs the rows after them through stock code
    too, so it gets the same bits.
    """

    batch_row: int
    first: int
    stop: int


@dataclass(frozen=True)
class LinearStep:
    """Index tensors (int64) of the special rows of one pass.

    Sources of the extended sequence are numbered: carried conv rows ``[carried * (k-1)]``, then the
    tails of ``tail_slots`` ``[tails * (k-1)]``, then the batch's token rows.

    ``extended``: source of each extended row; ``outputs``: extended row (minus k-1) of each packed
    token; ``tokens``: batch row of each packed token.  Packed are first the composed requests' inner chunks
    (boundaries ``inner_chunks``; only these need summaries), then their last chunks (boundaries of both:
    ``chunks``), then the captured interiors (boundaries ``interiors``, from 0).
    ``conv_after [composed, k-1]``: sources of the conv context after the composed chunks; ``rest``: what
    follows them; ``capture_tails``: conv context of captures that end in this pass.
    """

    carried_rows: torch.Tensor
    carried_resumed: torch.Tensor
    tail_slots: torch.Tensor
    extended: torch.Tensor
    outputs: torch.Tensor
    tokens: torch.Tensor
    inner_chunks: list[int]
    chunks: list[int]
    interiors: list[int]
    composed: tuple[ComposedOps, ...]
    conv_after: torch.Tensor
    rest: tuple[Rest, ...]
    captures: tuple[CaptureRow, ...]
    ended: tuple[CaptureRow, ...]
    capture_tails: torch.Tensor
    leading_ended: tuple[CaptureRow, ...]

    @property
    def chunk_tokens(self) -> int:
        """Packed tokens that belong to composed rows."""
        return self.chunks[-1]

    @property
    def empty(self) -> bool:
        return not (self.composed or self.captures or self.leading_ended)


def linear_step(step: StepContext, conv_rows: int, block: int) -> LinearStep:
    """The step's layout for convolutions that look back ``conv_rows`` rows and KV blocks of ``block``
    tokens; built once per pass."""
    key = f"linear:{conv_rows}:{block}"
    if key not in step.cache:
        step.cache[key] = _Builder(step, conv_rows, block).build()
    found = step.cache[key]
    assert isinstance(found, LinearStep)
    return found


@dataclass
class _Packed:
    """Runs of packed tokens of one kind: their extended rows and batch rows."""

    outputs: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)


def _boundaries(*kinds: _Packed) -> list[int]:
    """Rising token boundaries of the runs, from 0."""
    return [0, *accumulate(len(run) for kind in kinds for run in kind.tokens)]


class _Builder:
    """Walks requests, segments and chunks (never tokens)."""

    def __init__(self, step: StepContext, conv_rows: int, block: int) -> None:
        self.device, self.k, self.block = step.device, conv_rows, block
        self.rest: list[Rest] = []
        self.composed_rows = [c for c in step.composed if c.points]
        self.captures = [c for c in step.captures if not c.plan.leading and c.begin < c.end]
        self.leading = [c for c in step.captures if c.plan.leading and c.last]
        rows = [c.row for c in self.composed_rows] + [c.row for c in self.captures]
        self.carried = [(r.index, r.s0 > 0) for r in rows]
        self.tails = [p.slot for c in self.composed_rows for p in c.points]
        self.tail_base = len(self.carried) * conv_rows
        self.token_base = self.tail_base + len(self.tails) * conv_rows
        self.extended: list[np.ndarray] = []
        self.length = 0
        self.inner, self.final, self.interior = _Packed(), _Packed(), _Packed()

    def build(self) -> LinearStep:
        after, ops = [], []
        tail = 0
        for number, composed in enumerate(self.composed_rows):
            self._context(number * self.k)
            ops.append(self._walk(composed, tail))
            tail += len(composed.points)
            after.append(self._last_rows(self.k))
        tails = []
        for number, capture in enumerate(self.captures, start=len(self.composed_rows)):
            self._context(number * self.k)
            row = capture.row
            self._feed(self.interior, row.q0, capture.end - row.s0, skip=capture.begin - row.s0)
            if capture.last:
                tails.append(self._last_rows(self.k))
        return LinearStep(
            carried_rows=self._tensor([np.array([i for i, _ in self.carried], dtype=np.int64)]),
            carried_resumed=torch.tensor([r for _, r in self.carried], dtype=torch.bool, device=self.device),
            tail_slots=self._tensor([np.array(self.tails, dtype=np.int64)]),
            extended=self._tensor(self.extended),
            outputs=self._tensor([*self.inner.outputs, *self.final.outputs, *self.interior.outputs]),
            tokens=self._tensor([*self.inner.tokens, *self.final.tokens, *self.interior.tokens]),
            inner_chunks=_boundaries(self.inner),
            chunks=_boundaries(self.inner, self.final),
            interiors=_boundaries(self.interior),
            composed=tuple(ops),
            conv_after=self._tensor(after).view(-1, self.k),
            rest=tuple(self.rest),
            captures=tuple(self.captures),
            ended=tuple(c for c in self.captures if c.last),
            capture_tails=self._tensor(tails).view(-1, self.k),
            leading_ended=tuple(self.leading),
        )

    def _walk(self, composed: ComposedRow, tail: int) -> ComposedOps:
        row = composed.row
        ops: list[Chunk | Compose] = []
        cut = row.s0
        points = composed.points
        for number, point in enumerate(points):
            if point.at > cut:
                ops.append(Chunk(len(self.inner.tokens), last=False))
                self._feed(self.inner, row.q0 + cut - row.s0, point.at - cut)
                cut = point.at
            ops.append(Compose(point.slot, composed.stream.plan.use_transition, point.replace_state))
            self._context(self.tail_base + (tail + number) * self.k)
        ops.append(Chunk(len(self.final.tokens), last=True))
        stop = min(row.s1, (cut // self.block + 1) * self.block)
        self._feed(self.final, row.q0 + cut - row.s0, stop - cut)
        if stop < row.s1:
            self.rest.append(Rest(row.index, row.q0 + stop - row.s0, row.q1))
        return ComposedOps(row.index, row.s0 > 0, tuple(ops))

    def _context(self, source: int) -> None:
        """Put k-1 context rows into the extended sequence."""
        self._extend(np.arange(source, source + self.k))

    def _feed(self, packed: _Packed, first: int, count: int, skip: int = 0) -> None:
        """Put token rows ``[first, first + count)`` in; all but the first ``skip`` are packed tokens."""
        at = self.length
        self._extend(np.arange(first, first + count) + self.token_base)
        packed.outputs.append(np.arange(at + skip, at + count) - self.k)
        packed.tokens.append(np.arange(first + skip, first + count))

    def _extend(self, sources: np.ndarray) -> None:
        self.extended.append(sources)
        self.length += len(sources)

    def _last_rows(self, count: int) -> np.ndarray:
        """Sources of the last ``count`` extended rows."""
        rows: list[np.ndarray] = []
        missing = count
        for part in reversed(self.extended):
            rows.insert(0, part[max(0, len(part) - missing) :])
            missing -= len(rows[0])
            if missing <= 0:
                break
        return np.concatenate(rows)

    def _tensor(self, parts: list[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(joined.astype(np.int64)).to(self.device)
