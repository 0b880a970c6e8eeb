"""Gated delta rule in closed form (WY representation), batched over sequences, chunks and heads, in fp32.

One chunk of C tokens that starts from state S [K, V], with G_t = g_1 + ... + g_t:

    L_ts = beta_t e^{G_t - G_s} (k_t . k_s)      for s < t, else 0
    U    = (I + L)^-1 diag(beta) V               [C, V]   writes of a chunk that starts from zero
    W    = (I + L)^-1 diag(beta e^G) K           [C, K]   how far the start state changes them
    D    = U - W S                               [C, V]   the writes themselves
    S'   = e^{G_C} S + Kd^T D                    with Kd_s = e^{G_C - G_s} k_s
    o_t  = e^{G_t} q_t S + sum_{s <= t} e^{G_t - G_s} (q_t . k_s) D_s

T follows the same recurrence with V = 0, starting from I. L, U, W, Kd do not depend on S, so the code
computes these terms for many chunks at once. A scan over chunks then takes two batched matmuls per step.

Where every channel has a gate, G_t is a vector [K]: e^G k, e^G q and Kd are elementwise, and decays stand
inside the products, L_ts = beta_t sum_c k_tc k_sc e^{G_tc - G_sc}; products with q are alike. Keys then decay
token by token, in products of decays instead of differences of sums.

Symbols in the code: `heads` Hv value heads, `groups` Hk key heads, C `chunk`, n chunks of a block. Tensors of
chunks and states have one leading batch dimension, chunk (or sequence) major, value head minor.

Gates enter as differences G_t - G_s <= 0 only, taken in float64 (G may reach -3200 inside a chunk, where
float32 resolves 2e-4), so no gate overflows and strong gates cost no accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..decays import exp_
from .reference import l2_eps

_CHUNK_CPU = 32
_CHUNK_DEVICE = 64
"""Longest chunk (shorter inputs have shorter chunks). Long chunks cost C^2 work inside, which slows a CPU;
short chunks cost more scan steps, which slow a GPU."""

_BLOCK_BYTES_CPU = 8 << 20
_BLOCK_BYTES_DEVICE = 512 << 20
"""Bytes of the chunk-local tensors held at once: on a CPU, to fit the caches; on a GPU, to fill the GPU."""

_TINY = 1e-30
_SHRINK_EVERY = 4
"""At every fourth step, entries of T below 1e-30 become 0. Such numbers are invisible
beside states of size O(1), but their products are subnormal, and CPUs multiply subnormal numbers a hundred
times more slowly."""


def segment_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_T: Tensor | None = None,
    *,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return transition and end state of B packed sequences: S_after = T S_before + S.

    Changes none of its arguments. Never reads tokens outside [cu_seqlens[0], cu_seqlens[-1]).

    k           [N, Hk, K]  bf16, fp16, fp32 (float64 computes in float64); not normalised
    v           [N, Hv, V]  Hv a multiple of Hk
    g           [N, Hv]     log decay, <= 0; or [N, Hv, K], per channel
    beta        [N, Hv]     write strength
    cu_seqlens  B + 1 rising token boundaries, a list or a CPU tensor; empty sequences are allowed
    initial_T   [B, Hv, K, K]: T of the tokens before these tokens, for a segment that arrives in several
                pieces (T <- T2 T1); S is always the end state of these tokens alone; default I
    eps         of the l2 norm; default: vLLM's on this device, see `l2_eps`

    Returns (T [B, Hv, K, K], S [B, Hv, K, V]), fp32.
    """
    work = _Inputs.check(None, k, v, g, beta, eps)
    grid = _Grid.over(cu_seqlens, k.shape[0], work)
    S = grid.load(None, work.V, work.dtype, "initial_S")
    T = grid.load(initial_T, work.K, work.dtype, "initial_T")
    if initial_T is None:
        T.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    for block in grid.blocks():
        local = work.chunk_terms(block)
        for step, states, here in block.steps:
            W, Kd, end = local.W[here], local.Kd[here].mT, local.end[here]
            state = S[states]
            if step == 0:
                torch.bmm(Kd, local.U[here], out=state)
            else:
                D = torch.baddbmm(local.U[here], W, state, alpha=-1.0)
                state.mul_(end).baddbmm_(Kd, D)
            state = T[states]
            D = W if step == 0 and initial_T is None else torch.bmm(W, state)
            state.mul_(end).baddbmm_(Kd, D, alpha=-1.0)
            if step % _SHRINK_EVERY == _SHRINK_EVERY - 1:
                state.copy_(torch.nn.functional.hardshrink(state, _TINY))
    return grid.store(T), grid.store(S)


def seam_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_states: Tensor,
    *,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and end states of B packed sequences, each from its own start state.

    Changes none of its arguments. Arguments are as in `segment_summary`, and

    q               [N, Hk, K]        not normalised, not scaled
    initial_states  [B, Hv, K, V]     any float dtype; computed in fp32

    Returns (o [N, Hv, V] in v's dtype, zero at tokens outside all sequences; end states [B, Hv, K, V] fp32).
    """
    work = _Inputs.check(q, k, v, g, beta, eps)
    grid = _Grid.over(cu_seqlens, k.shape[0], work)
    S = grid.load(initial_states, work.V, work.dtype, "initial_states", copy=False)
    final = torch.empty_like(S)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)

    for block in grid.blocks():
        local = work.chunk_terms(block)
        assert local.A is not None and local.WQ is not None
        o = torch.empty_like(local.U)
        for step, states, here in block.steps:
            before = S[states] if step == 0 else final[states]
            # One product reads the states once for both results.
            WS, QS = torch.bmm(local.WQ[here], before).tensor_split(2, dim=1)
            D = local.U[here] - WS
            torch.baddbmm(QS, local.A[here], D, out=o[here])
            after = torch.mul(before, local.end[here], out=final[states])
            after.baddbmm_(local.Kd[here].mT, D)
        block.scatter(out, o)
    untouched = slice(grid.states_at(0), None)
    final[untouched] = S[untouched]
    return out, grid.store(final)


# ------------------------------------------------------------------------------------------ chunk-local part


@dataclass(frozen=True)
class _Terms:
    """The terms of a block of n chunks, which hold for any start state; see the module's equations."""

    U: Tensor  # [n Hv, C, V]
    W: Tensor  # [n Hv, C, K]
    Kd: Tensor  # [n Hv, C, K]
    end: Tensor  # [n Hv, 1 or K, 1]    e^{G_C}
    WQ: Tensor | None  # [n Hv, 2C, K]  W above e^{G_t} q_t
    A: Tensor | None  # [n Hv, C, C]    e^{G_t - G_s} q_t . k_s for s <= t


@dataclass(frozen=True)
class _Inputs:
    """The checked arguments of one call, and the sizes derived from them."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    eps: float
    dtype: torch.dtype
    heads: int
    groups: int
    K: int
    V: int

    @classmethod
    def check(
        cls, q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, eps: float | None
    ) -> _Inputs:
        tokens, groups, K = k.shape
        heads, V = v.shape[1:]
        if heads % groups:
            raise ValueError(f"{heads} value heads are not a multiple of {groups} key heads")
        of_gates = ((tokens, heads), (tokens, heads, K))
        if v.shape[0] != tokens or g.shape not in of_gates or beta.shape != (tokens, heads):
            raise ValueError(
                f"shapes disagree: k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}, "
                f"beta {tuple(beta.shape)}; expected k [N, Hk, K], v [N, Hv, V], "
                "g [N, Hv] or [N, Hv, K], beta [N, Hv]"
            )
        if q is not None and q.shape != k.shape:
            raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have one shape [N, Hk, K]")
        dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype) else torch.float32
        eps = l2_eps(k.device) if eps is None else eps
        return cls(q, k, v, g, beta, eps, dtype, heads, groups, K, V)

    def chunk_terms(self, block: _Block) -> _Terms:
        """Return the terms of the block's chunks, for all heads at once."""
        if self.g.dim() == 3:
            return self._channel_terms(block)
        C, K, V = block.chunk, self.K, self.V
        k = self._normalised(block.gather(self.k, self.dtype))
        v = block.gather(self.v, self.dtype)
        beta = block.gather(self.beta, self.dtype)[..., None]
        G = block.gather(self.g, torch.float64).cumsum(-1)
        n = G.shape[0]
        by_group = (n, self.groups, self.heads // self.groups)
        flat = n * self.heads

        # Above the diagonal the difference is positive: the clamp keeps it from becoming infinite.
        decay = exp_((G[..., :, None] - G[..., None, :]).to(self.dtype).clamp_(max=0.0))
        from_start = exp_(G.to(self.dtype))[..., None]
        to_end = decay[..., -1, :, None]
        decay = decay.view(*by_group, C, C)

        gram = torch.matmul(k, k.mT).unsqueeze(2)
        L = (gram * decay).view(n, self.heads, C, C).mul_(beta).view(flat, C, C)
        # The solver reads only the part strictly below the diagonal.
        eye = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)
        inverse = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
        U = torch.bmm(inverse, v.mul_(beta).view(flat, C, V))
        k_heads = k.unsqueeze(2)
        decayed = (k_heads * (beta * from_start).view(*by_group, C, 1)).view(flat, C, K)
        Kd = (k_heads * to_end.reshape(*by_group, C, 1)).view(flat, C, K)
        end = from_start[..., -1:, :].reshape(flat, 1, 1)
        if self.q is None:
            return _Terms(U, torch.bmm(inverse, decayed), Kd, end, None, None)

        q = self._normalised(block.gather(self.q, self.dtype)).mul_(K**-0.5)
        A = (torch.matmul(q, k.mT).unsqueeze(2) * decay).view(flat, C, C).tril_()
        WQ = torch.empty(flat, 2 * C, K, dtype=self.dtype, device=k.device)
        W = torch.bmm(inverse, decayed, out=WQ[:, :C])
        torch.mul(q.unsqueeze(2), from_start.view(*by_group, C, 1), out=WQ[:, C:].view(*by_group, C, K))
        return _Terms(U, W, Kd, end, WQ, A)

    def _channel_terms(self, block: _Block) -> _Terms:
        """Return the terms for gates per channel; a loop runs over the tokens of all chunks in parallel."""
        C, K, V = block.chunk, self.K, self.V
        decay = exp_(block.gather(self.g, self.dtype))
        flat = decay.shape[0] * self.heads
        decay = decay.view(flat, C, K)

        def of_values(x: Tensor) -> Tensor:
            heads = self._normalised(block.gather(x, self.dtype))
            return heads.repeat_interleave(self.heads // self.groups, dim=1).view(flat, C, K)

        k = of_values(self.k)
        rows = k if self.q is None else torch.cat([k, of_values(self.q).mul_(K**-0.5)], 1)
        beta = block.gather(self.beta, self.dtype).view(flat, C, 1)
        # [chunk, k or q, token t, token s]
        products = k.new_zeros(flat, rows.shape[1] // C, C, C)
        Kd, from_start = k.clone(), decay.cumprod(1)
        for t in range(C):
            Kd[:, :t] *= decay[:, t : t + 1]
            products[:, :, t, : t + 1] = rows[:, t::C] @ Kd[:, : t + 1].mT
        eye = torch.eye(C, dtype=k.dtype, device=k.device).expand(flat, C, C)
        inverse = torch.linalg.solve_triangular(products[:, 0] * beta, eye, upper=False, unitriangular=True)
        v = block.gather(self.v, self.dtype).view(flat, C, V)
        U = torch.bmm(inverse, beta * v)
        W = torch.bmm(inverse, beta * from_start * k)
        end = from_start[:, -1, :, None]
        if self.q is None:
            return _Terms(U, W, Kd, end, None, None)
        return _Terms(U, W, Kd, end, torch.cat([W, from_start * rows[:, C:]], 1), products[:, 1])

    def _normalised(self, x: Tensor) -> Tensor:
        return x.mul_(torch.rsqrt(torch.linalg.vecdot(x, x).add_(self.eps))[..., None])


# ----------------------------------------------------------------------------- packed tokens <-> chunk grid


@dataclass(frozen=True)
class _Block:
    """A series of neighbouring chunks of a grid, with their tokens and their scan steps."""

    chunk: int
    count: int
    rows: slice | Tensor  # token of every place, chunk major; any token at an empty place
    empty: Tensor | None  # [n, 1, C] bool: places without a token; None if there are none
    steps: list[tuple[int, slice, slice]]  # (scan step, its states, its chunks here), both counted in heads

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather [N, H, ...] into a new tensor [n, H, C, ...] of `dtype`, zero where no token is."""
        picked = x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)
        picked = picked.view(self.count, self.chunk, *picked.shape[1:]).transpose(1, 2)
        # Always a copy: callers work in place on the result.
        out = torch.empty(picked.shape, dtype=dtype, device=x.device).copy_(picked)
        if self.empty is not None:
            # Not a product with 0: the tokens read for empty places may be NaN.
            out.masked_fill_(self.empty if out.dim() == 3 else self.empty[..., None], 0.0)
        return out

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """Write x [n Hv, C, V] to the block's tokens in out [N, Hv, V]."""
        x = x.view(self.count, -1, *x.shape[1:]).transpose(1, 2)
        if isinstance(self.rows, slice):
            out[self.rows].view(x.shape).copy_(x)
            return
        x, rows = x.flatten(0, 1), self.rows
        if self.empty is not None:
            real = ~self.empty.flatten()
            x, rows = x[real], rows[real]
        out.index_copy_(0, rows, x.to(out.dtype))


@dataclass(frozen=True)
class _Grid:
    """B packed sequences laid out as chunks of one length.

    Sequences are sorted by falling length ("rank"), chunks by (position in the sequence, rank): the chunks of
    one scan step lie side by side, and so do their states.
    """

    chunk: int
    block: int  # chunks to treat at once
    heads: int
    K: int
    starts: list[int]  # first token, by rank
    lengths: list[int]  # tokens, by rank
    order: list[int] | None  # rank -> sequence; None: unchanged
    counts: list[int]  # per step, how many sequences still have a chunk
    device: torch.device

    @classmethod
    def over(cls, cu_seqlens: Sequence[int] | Tensor, tokens: int, work: _Inputs) -> _Grid:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(x) for x in cu_seqlens]
        lengths = [b - a for a, b in pairwise(bounds)]
        if not bounds or bounds[0] < 0 or bounds[-1] > tokens or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens must rise from >= 0 to <= {tokens} tokens, got {bounds}")
        on_cpu = work.k.device.type == "cpu"
        C = max(1, min(_CHUNK_CPU if on_cpu else _CHUNK_DEVICE, max(lengths, default=1)))
        ranks = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        ordered = [lengths[i] for i in ranks]
        counts, alive = [], len(ordered)
        for done in range(0, max(ordered, default=0), C):
            while ordered[alive - 1] <= done:
                alive -= 1
            counts.append(alive)
        elements = work.heads * C * (2 * work.K + 2 * work.V + 2 * C)
        if work.q is not None:
            elements += 2 * work.heads * work.K * work.V  # seam outputs hold up to two states per chunk
        limit = _BLOCK_BYTES_CPU if on_cpu else _BLOCK_BYTES_DEVICE
        block = max(1, limit // (elements * work.dtype.itemsize))
        order = None if ranks == list(range(len(ranks))) else ranks
        return cls(
            C, block, work.heads, work.K, [bounds[i] for i in ranks], ordered, order, counts, work.k.device
        )

    def states_at(self, step: int) -> int:
        """Return the number of states, from the first, that have a chunk at this scan step."""
        return (self.counts[step] if step < len(self.counts) else 0) * self.heads

    def blocks(self) -> Iterator[_Block]:
        """Yield all chunks in blocks, in scan order."""
        start, length = torch.tensor(self.starts), torch.tensor(self.lengths)
        places = torch.arange(self.chunk)
        if len(self.starts) == 1:
            first = start + self.chunk * torch.arange(len(self.counts))
            last = (start + length).expand_as(first)
        else:
            nothing = [start[:0]]
            first = torch.cat(nothing + [start[:n] + self.chunk * i for i, n in enumerate(self.counts)])
            last = torch.cat(nothing + [(start + length)[:n] for n in self.counts])
        for lo in range(0, sum(self.counts), self.block):
            hi = min(lo + self.block, len(first))
            rows = first[lo:hi, None] + places
            empty = rows >= last[lo:hi, None]
            in_order = hi - lo == 1 or bool((first[lo + 1 : hi] - first[lo : hi - 1] == self.chunk).all())
            where: slice | Tensor
            if in_order and not bool(empty.any()):
                where, mask = slice(int(first[lo]), int(first[lo]) + rows.numel()), None
            else:
                where = torch.minimum(rows, last[lo:hi, None] - 1).flatten().to(self.device)
                mask = empty[:, None].to(self.device)
            yield _Block(self.chunk, hi - lo, where, mask, list(self._steps(lo, hi)))

    def _steps(self, lo: int, hi: int) -> Iterator[tuple[int, slice, slice]]:
        begin, H = 0, self.heads
        for step, count in enumerate(self.counts):
            a, b = max(lo, begin), min(hi, begin + count)
            if a < b:
                yield step, slice((a - begin) * H, (b - begin) * H), slice((a - lo) * H, (b - lo) * H)
            begin += count

    def load(self, given: Tensor | None, M: int, dtype: torch.dtype, name: str, copy: bool = True) -> Tensor:
        """Return states [B, Hv, K, M] as [B Hv, K, M] by rank, or zeros; `copy`: never share memory."""
        shape = (len(self.starts), self.heads, self.K, M)
        if given is None:
            return torch.zeros(shape, dtype=dtype, device=self.device).flatten(0, 1)
        if given.shape != shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, expected {shape}")
        state = given if self.order is None else given[self.order]
        state = state.to(dtype, copy=copy, memory_format=torch.contiguous_format)
        return state.contiguous().flatten(0, 1)

    def store(self, states: Tensor) -> Tensor:
        """Return states in the sequences' order: the inverse of `load`."""
        states = states.view(len(self.starts), self.heads, self.K, states.shape[-1])
        if self.order is None:
            return states
        out = torch.empty_like(states)
        out[self.order] = states
        return out
