"""The layer operators in PyTorch, in closed form over chunks of rows.

A chunk of n tokens that starts from state S [P, N], with G_t = A (d_1 + ... + d_t):

    y_t  = e^{G_t} S C_t + sum_{s <= t} e^{G_t - G_s} d_s (C_t . B_s) x_s + D x_t
    S'   = e^{G_n} S + U        with U = sum_s e^{G_n - G_s} d_s x_s B_s^T

The sums do not depend on S, so the code computes them for many chunks of all requests at once. A walk over
the chunks then computes each start state elementwise, and one step adds the states' terms to all outputs.

Gates enter as differences G_t - G_s <= 0 only, taken in float64, so no gate overflows and strong gates cost
no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decays import exp_
from ..linear_layer.arguments import LayerCaches
from ..program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from .arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights
from .reference import activated

_CHUNK = 64
_BLOCK_BYTES_CPU = 8 << 20
_BLOCK_BYTES_DEVICE = 512 << 20
"""Bytes of the chunks' tensors held at once: on a CPU, to fit the caches; on a GPU, to fill the GPU."""


def mamba2_segments(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    carries: Sequence[Mamba2Carry],
) -> None:
    """See the package."""
    run = _Run(x, weights, caches, out, records)
    for r in unpack(rows, SegmentRow):
        walk = run.start(r.batch_row, r.resumed)
        interior, summed = r.begin < r.end, not r.leading
        run.rows(walk, r.first, r.begin)
        if interior and summed:
            run.then(partial(walk.begin, None if r.begins else carries[r.carry]))
        run.rows(walk, r.begin, r.end)
        if r.ends:
            records.conv_tail[r.slot] = walk.context
            run.then(partial(walk.record, records, r.slot))
        elif interior and summed:
            run.then(partial(walk.pause, carries[r.carry]))
        run.rows(walk, r.end, r.stop)
        run.finish(walk)
    run.execute()


def mamba2_compose(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    run = _Run(x, weights, caches, out, records)
    operations = unpack(ops, ComposeOp)
    for r in unpack(rows, ComposeRow):
        walk = run.start(r.batch_row, r.resumed)
        for op in operations[r.first_op : r.stop_op]:
            mode = Mode(op.mode)
            if mode == Mode.RESTORE:
                run.then(walk.keep)
            run.rows(walk, op.first, op.first + op.tokens)
            if mode == Mode.RESTORE:
                run.then(walk.restore)
            if mode.applies:
                run.then(partial(walk.apply, records, op.slot, mode))
                walk.context = records.conv_tail[op.slot]
        run.finish(walk)
    run.execute()


# ---------------------------------------------------------------------------------------------- one request


@dataclass
class _Walk:
    """A request's walk through the layer.

    context  [taps - 1, channels]  the convolution's inputs before the next rows; runs ahead of other fields
    state    [H, P, N]
    alone    [H, P, N] from zero over the interior's rows, whose log T is `log` [H] float64; else `None`
    """

    slot: int
    context: Tensor
    state: Tensor
    alone: Tensor | None = None
    log: Tensor | None = None
    kept: Tensor | None = None

    def advance(self, log_decay: Tensor, decay: Tensor, added: Tensor) -> None:
        """Advance over a chunk: log_decay [H] float64, decay [H, 1, 1], added [H, P, N]."""
        self.state = torch.addcmul(added, decay, self.state)
        if self.alone is not None and self.log is not None:
            self.alone = torch.addcmul(added, decay, self.alone)
            self.log = self.log + log_decay

    def begin(self, carry: Mamba2Carry | None) -> None:
        if carry is None:
            self.alone = torch.zeros_like(self.state)
            self.log = self.state.new_zeros(len(self.state), dtype=torch.float64)
        else:
            # Copy log T, for `pause` writes to the carry; `advance` replaces the state and never changes it.
            self.alone, self.log = carry.state.to(self.state.dtype), carry.log_transition.clone()

    def pause(self, carry: Mamba2Carry) -> None:
        assert self.alone is not None and self.log is not None
        carry.state.copy_(self.alone)
        carry.log_transition.copy_(self.log)
        self.alone = self.log = None

    def record(self, records: Mamba2Records, slot: int) -> None:
        if self.alone is None or self.log is None:
            records.state[slot] = self.state
            records.log_transition[slot] = -torch.inf
        else:
            records.state[slot] = self.alone
            records.log_transition[slot] = self.log.to(records.log_transition.dtype)
        self.alone = self.log = None

    def keep(self) -> None:
        self.kept = self.state

    def restore(self) -> None:
        assert self.kept is not None
        self.state = self.kept

    def apply(self, records: Mamba2Records, slot: int, mode: Mode) -> None:
        after = records.state[slot]
        if mode == Mode.ADD:
            after = after + self.state
        elif mode == Mode.TRANSITION:
            T = records.log_transition[slot].exp()[:, None, None]
            after = torch.addcmul(after, T, self.state)
        self.state = after


# ---------------------------------------------------------------------------------------------- all requests


@dataclass(frozen=True)
class _Chunk:
    """Rows [first, first + count) of a walk; `context`: the convolution's inputs before the rows, or `None`
    if the inputs are the rows before."""

    walk: _Walk
    first: int
    count: int
    context: Tensor | None


Step = _Chunk | Callable[[], None]


@dataclass(frozen=True)
class _Terms:
    """Terms of n chunks of C rows that do not depend on the start states; some rows are empty.

    row    [n, C]              batch row; for an empty row, some row of its chunk
    full   [n, C]              whether the row is not empty
    y      [n, H, C, P]        outputs without the start state's term
    C      [n, G, C, N]
    G      [n, H, C]           float64
    U      [n, H, P, N]
    """

    row: Tensor
    full: Tensor
    y: Tensor
    C: Tensor
    G: Tensor
    U: Tensor


@dataclass
class _Run:
    """One call of an operator: the steps of all requests, in order."""

    x: Mamba2Inputs
    weights: Mamba2Weights
    caches: LayerCaches
    out: Tensor
    records: Mamba2Records
    steps: list[Step] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computed states: the dtype of the records' states."""
        return self.records.state.dtype

    def start(self, batch_row: int, resumed: int) -> _Walk:
        slot = int(self.caches.slots[batch_row])
        context, state = self.caches.conv[slot], self.caches.state[slot]
        if not resumed:
            return _Walk(slot, torch.zeros_like(context), torch.zeros_like(state, dtype=self.dtype))
        # Copies: steps write the caches before other steps read them.
        return _Walk(slot, context.clone(), state.to(self.dtype, copy=True))

    def rows(self, walk: _Walk, first: int, stop: int) -> None:
        context: Tensor | None = walk.context
        for at in range(first, stop, _CHUNK):
            self.steps.append(_Chunk(walk, at, min(_CHUNK, stop - at), context))
            context = None
        if first < stop:
            seen = len(walk.context)
            last = self.x.mixed[max(first, stop - seen) : stop]
            walk.context = torch.cat([walk.context.to(last.dtype), last])[-seen:]

    def then(self, action: Callable[[], None]) -> None:
        self.steps.append(action)

    def finish(self, walk: _Walk) -> None:
        self.caches.conv[walk.slot] = walk.context
        self.steps.append(partial(self._finish, walk))

    def _finish(self, walk: _Walk) -> None:
        self.caches.state[walk.slot] = walk.state.to(self.caches.state.dtype)

    def execute(self) -> None:
        for block in self._blocks():
            chunks = [step for step in block if isinstance(step, _Chunk)]
            terms = self._terms(chunks) if chunks else None
            starts, number = [], 0
            for step in block:
                if not isinstance(step, _Chunk):
                    step()
                    continue
                assert terms is not None
                starts.append(step.walk.state)
                log_decay = terms.G[number, :, -1]
                decay = exp_(log_decay.to(self.dtype, copy=True))[:, None, None]
                step.walk.advance(log_decay, decay, terms.U[number])
                number += 1
            if terms is not None:
                self._write(terms, torch.stack(starts))

    def _blocks(self) -> Iterator[list[Step]]:
        """Yield the steps in blocks: a block's chunks fill the memory limit, and empty rows take at most
        about half of a block."""
        heads, P, N = self.caches.state.shape[1:]
        state = 3 * heads * P * N
        limit = _BLOCK_BYTES_CPU if self.x.mixed.device.type == "cpu" else _BLOCK_BYTES_DEVICE
        block: list[Step] = []
        count = rows = longest = 0
        for step in self.steps:
            if isinstance(step, _Chunk):
                most, total = max(longest, step.count), rows + step.count
                elements = (count + 1) * (state + heads * most * (2 * most + 3 * P))
                if count and (
                    elements * self.dtype.itemsize > limit or (count + 1) * most > 2 * total + _CHUNK
                ):
                    yield block
                    block, count, most, total = [], 0, step.count, step.count
                count, rows, longest = count + 1, total, most
            block.append(step)
        yield block

    def _terms(self, chunks: Sequence[_Chunk]) -> _Terms:
        w, dtype, device = self.weights, self.dtype, self.x.mixed.device
        heads, P, N = self.caches.state.shape[1:]
        first, count = torch.tensor([(c.first, c.count) for c in chunks]).T[:, :, None]
        longest = int(count.max())
        place = torch.arange(longest)
        full = (place < count).to(device)
        row = (first + place.minimum(count - 1)).to(device)
        x, B, C = self._convolved(chunks, row).split([heads * P, w.groups * N, w.groups * N], dim=-1)
        x = x.unflatten(-1, (heads, P)).transpose(1, 2)
        B, C = (t.unflatten(-1, (w.groups, N)).transpose(1, 2).to(dtype).contiguous() for t in (B, C))
        d = F.softplus(self.x.dt[row].to(dtype) + w.dt_bias)
        d = d.masked_fill_(~full[:, :, None], 0.0).transpose(1, 2)  # [n, H, C]
        G = (w.rate.double()[:, None] * d).cumsum(-1)

        # Above the diagonal the difference is positive: the clamp keeps it from becoming infinite.
        decay = exp_((G[..., :, None] - G[..., None, :]).clamp_(max=0.0).to(dtype))
        by_group = (len(chunks), w.groups, heads // w.groups)
        scores = torch.matmul(C, B.mT).unsqueeze(2) * decay.view(*by_group, longest, longest)
        written = x * d[..., None]
        y = torch.matmul(scores.view(decay.shape).tril_(), written)
        y.addcmul_(w.D.to(dtype)[:, None, None], x.to(dtype))
        written *= decay[..., -1, :, None]
        U = torch.matmul(written.mT.reshape(*by_group[:2], -1, longest), B)
        return _Terms(row, full, y, C, G, U.view(len(chunks), heads, P, N))

    def _convolved(self, chunks: Sequence[_Chunk], row: Tensor) -> Tensor:
        """Return x, B and C of the chunks' rows [n, C], in the inputs' dtype: [n, C, channels]."""
        w, mixed = self.weights, self.x.mixed
        taps, length = len(w.weight), row.shape[1]
        before = row[:, :1] - torch.arange(taps - 1, 0, -1, device=row.device)
        window = mixed[torch.cat([before.clamp_(min=0), row], dim=1)]
        for i, chunk in enumerate(chunks):
            if chunk.context is not None:
                window[i, : taps - 1] = chunk.context
        window = window.to(self.dtype)
        weight = w.weight.to(self.dtype)
        total = window[:, :length] * weight[0]
        for tap in range(1, taps):
            total.addcmul_(window[:, tap : tap + length], weight[tap])
        if w.bias is not None:
            total += w.bias
        return activated(total, mixed.dtype)

    def _write(self, terms: _Terms, starts: Tensor) -> None:
        """Write the outputs of the chunks that start from `starts` [n, H, P, N]."""
        n, _, P, N = starts.shape
        groups, length = terms.C.shape[1:3]
        of_start = torch.matmul(terms.C, starts.view(n, groups, -1, N).mT)  # [n, G, C, (H / G) P]
        of_start = of_start.view(n, groups, length, -1, P).transpose(2, 3).reshape(terms.y.shape)
        y = terms.y.addcmul_(exp_(terms.G.to(self.dtype, copy=True))[..., None], of_start).transpose(1, 2)
        self.out[terms.row[terms.full]] = y[terms.full].to(self.out.dtype)
