"""Gated delta rule in closed form (WY representation), batched over sequences, chunks and heads; exact in fp32.

One chunk of C tokens that starts from state S [K, V], with G_t = g_1 + ... + g_t:

    L_ts = beta_t e^{G_t - G_s} (k_t . k_s)      for s < t, else 0
    U    = (I + L)^-1 diag(beta) V               [C, V]   writes of a chunk that starts from zero
    W    = (I + L)^-1 diag(beta e^G) K           [C, K]   how far the start state changes them
    D    = U - W S                               [C, V]   the writes themselves
    S'   = e^{G_C} S + Kd^T D                    with Kd_s = e^{G_C - G_s} k_s
    o_t  = e^{G_t} q_t S + sum_{s <= t} e^{G_t - G_s} (q_t . k_s) D_s

T follows the same recurrence with V = 0, starting from I. L, U, W, Kd do not depend on S, so they are computed for
many chunks at once; what is left of the sequence is a scan over chunks of two batched matmuls.

Symbols in the code: `heads` Hv value heads, `groups` Hk key heads, C `chunk`, n chunks of a block.

Gates enter as differences G_t - G_s <= 0 only, taken in float64 (G may reach -3200 inside a chunk, where float32
resolves 2e-4), so no gate overflows and strong gates cost no accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta.reference import l2_eps

CHUNK = 64
"""Longest chunk. 64 balances the C^2 work inside chunks against the number of scan steps; shorter input, shorter chunk."""

_BLOCK_BYTES_CPU = 4 << 20
_BLOCK_BYTES_DEVICE = 512 << 20
"""How much of the chunk-local tensors to hold at once: on a CPU what the caches hold, on a GPU what fills it."""

_LOG_TINY = -69.0
_TINY = 1e-30
"""Decays below e^-69 and entries of T below 1e-30 become 0: they cannot be seen beside O(1) states, but their
products are subnormal numbers, on which CPUs multiply a hundred times more slowly."""


@overload
def segment_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_T: Tensor | None = None,
    initial_S: Tensor | None = None,
    *,
    need_T: Literal[True] = True,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def segment_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_T: Tensor | None = None,
    initial_S: Tensor | None = None,
    *,
    need_T: bool,
    eps: float | None = None,
) -> tuple[Tensor | None, Tensor]: ...


def segment_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_T: Tensor | None = None,
    initial_S: Tensor | None = None,
    *,
    need_T: bool = True,
    eps: float | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Transition and end state of B packed sequences: S_after = T S_before + S.

    Changes none of its arguments. Tokens outside [cu_seqlens[0], cu_seqlens[-1]) are never read.

    k           [N, Hk, K]  bf16, fp16, fp32 (float64 computes in float64); not normalised
    v           [N, Hv, V]  Hv a multiple of Hk
    g           [N, Hv]     log decay, <= 0
    beta        [N, Hv]     write strength
    cu_seqlens  B + 1 rising token boundaries, a list or a CPU tensor; empty sequences are allowed
    initial_T   [B, Hv, K, K], initial_S [B, Hv, K, V]: the summary of the tokens before these ones, when a segment
                arrives in several pieces (T <- T2 T1, S <- T2 S1 + S2); default I and 0
    need_T      False skips T (leading segments need none): half the work
    eps         of the l2 norm; default: vLLM's on this device, see `l2_eps`

    Returns (T [B, Hv, K, K] or None, S [B, Hv, K, V]), fp32.
    """
    work = _Inputs.check(None, k, v, g, beta, eps)
    grid = _Grid.over(cu_seqlens, k.shape[0], work.block_chunks)
    shape_T, shape_S = (grid.batch, work.heads, work.K, work.K), (grid.batch, work.heads, work.K, work.V)
    S = work.start(initial_S, shape_S, "initial_S", grid)
    T = work.start(initial_T, shape_T, "initial_T", grid) if need_T else None
    if T is not None and initial_T is None:
        T.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    for lo, hi in grid.blocks():
        local = work.chunk_terms(grid, lo, hi)
        for step, rank, at, count in grid.steps(lo, hi):
            here = slice(at, at + count)
            fresh = step == 0
            _scan(S, rank, local, here, writes=local.U, zero_start=fresh and initial_S is None)
            if T is not None:
                _scan(T, rank, local, here, writes=None, zero_start=False, unit_start=fresh and initial_T is None)
    return (grid.unsort(T) if T is not None else None), grid.unsort(S)


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
    """Outputs and end states of B packed sequences, each from a start state of its own.

    Changes none of its arguments. Arguments as in `segment_summary`, and

    q               [N, Hk, K]        not normalised, not scaled
    initial_states  [B, Hv, K, V]     any float dtype; computed in fp32

    Returns (o [N, Hv, V] in v's dtype, zero at tokens of no sequence; final states [B, Hv, K, V] fp32).
    """
    work = _Inputs.check(q, k, v, g, beta, eps)
    grid = _Grid.over(cu_seqlens, k.shape[0], work.block_chunks)
    S = work.start(initial_states, (grid.batch, work.heads, work.K, work.V), "initial_states", grid)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)

    for lo, hi in grid.blocks():
        local = work.chunk_terms(grid, lo, hi)
        assert local.Q is not None and local.A is not None
        parts = []
        for _, rank, at, count in grid.steps(lo, hi):
            here = slice(at, at + count)
            before = S[rank : rank + count]
            read = torch.matmul(local.Q[here], before)
            writes = _scan(S, rank, local, here, writes=local.U, zero_start=False)
            parts.append(_baddbmm(read, local.A[here], writes))
        grid.scatter(out, lo, hi, torch.cat(parts) if len(parts) > 1 else parts[0])
    return out, grid.unsort(S)


# ---------------------------------------------------------------------------------------------------- chunk-local part


@dataclass(frozen=True)
class _Terms:
    """What a block of n chunks contributes, whatever its start state; see the module's equations."""

    U: Tensor  # [n, Hv, C, V]
    W: Tensor  # [n, Hv, C, K]
    Kd: Tensor  # [n, Hv, C, K]
    end: Tensor  # [n, Hv, 1, 1]       e^{G_C}
    Q: Tensor | None  # [n, Hv, C, K]  e^{G_t} q_t
    A: Tensor | None  # [n, Hv, C, C]  e^{G_t - G_s} q_t . k_s for s <= t


@dataclass(frozen=True)
class _Inputs:
    """Checked arguments of one call and the sizes derived from them."""

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
        if v.shape[0] != tokens or g.shape != (tokens, heads) or beta.shape != (tokens, heads):
            raise ValueError(
                f"shapes disagree: k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}, "
                f"beta {tuple(beta.shape)}; expected k [N, Hk, K], v [N, Hv, V], g and beta [N, Hv]"
            )
        if q is not None and q.shape != k.shape:
            raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have one shape [N, Hk, K]")
        dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype) else torch.float32
        eps = l2_eps(k.device) if eps is None else eps
        return cls(q, k, v, g, beta, eps, dtype, heads, groups, K, V)

    def block_chunks(self, chunk: int) -> int:
        """How many chunks of this length to treat at once."""
        elements = self.heads * chunk * (2 * self.K + 2 * self.V + 2 * chunk)
        limit = _BLOCK_BYTES_CPU if self.k.device.type == "cpu" else _BLOCK_BYTES_DEVICE
        return max(1, limit // (elements * self.dtype.itemsize))

    def start(self, initial: Tensor | None, shape: tuple[int, ...], name: str, grid: _Grid) -> Tensor:
        """A private copy of the start states in the grid's order; zeros if none are given."""
        if initial is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.k.device)
        if initial.shape != shape:
            raise ValueError(f"{name} has shape {tuple(initial.shape)}, expected {shape}")
        state = grid.sort(initial).to(self.dtype, memory_format=torch.contiguous_format)
        return state.clone() if state.data_ptr() == initial.data_ptr() else state

    def chunk_terms(self, grid: _Grid, lo: int, hi: int) -> _Terms:
        """The terms of chunks lo .. hi of the grid, for all heads at once."""
        C, repeat = grid.chunk, self.heads // self.groups
        k = self._normalised(grid.gather(self.k, lo, hi, self.dtype))
        v = grid.gather(self.v, lo, hi, self.dtype)
        beta = grid.gather(self.beta, lo, hi, self.dtype)[..., None]
        G = grid.gather(self.g, lo, hi, torch.float64).cumsum(-1)
        n = G.shape[0]

        # Above the diagonal the difference is positive: clamp it, so that nothing there is infinite.
        decay = _exp((G[..., :, None] - G[..., None, :]).to(self.dtype).clamp_(max=0.0))
        from_start = _exp(G.to(self.dtype))[..., None]
        to_end = decay[..., -1, :, None]

        per_group = (n, self.groups, repeat)
        gram = torch.matmul(k, k.mT).unsqueeze(2)
        L = (gram * decay.view(*per_group, C, C)).view(n, self.heads, C, C).mul_(beta)
        k_heads = k.unsqueeze(2)
        W = (k_heads * (beta * from_start).view(*per_group, C, 1)).view(n, self.heads, C, self.K)
        Kd = (k_heads * to_end.reshape(*per_group, C, 1)).view(n, self.heads, C, self.K)
        # The solver reads the part strictly below the diagonal only.
        inverse = torch.linalg.solve_triangular(L, _eye_like(L), upper=False, unitriangular=True)
        U, W = torch.matmul(inverse, v.mul_(beta)), torch.matmul(inverse, W)

        Q = A = None
        if self.q is not None:
            q = self._normalised(grid.gather(self.q, lo, hi, self.dtype)).mul_(self.K**-0.5)
            scores = torch.matmul(q, k.mT).unsqueeze(2)
            A = (scores * decay.view(*per_group, C, C)).view(n, self.heads, C, C).tril_()
            Q = (q.unsqueeze(2) * from_start.view(*per_group, C, 1)).view(n, self.heads, C, self.K)
        return _Terms(U, W, Kd, from_start[..., -1:, :], Q, A)

    def _normalised(self, x: Tensor) -> Tensor:
        return x.mul_(torch.rsqrt(torch.linalg.vecdot(x, x).add_(self.eps))[..., None])


def _exp(x: Tensor) -> Tensor:
    """e^x for x <= 0, in place, with what is too small to matter set to 0."""
    return torch.nn.functional.threshold_(x, _LOG_TINY, float("-inf")).exp_()


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)


# -------------------------------------------------------------------------------------------------- scan over chunks


def _scan(
    X: Tensor,
    rank: int,
    local: _Terms,
    here: slice,
    *,
    writes: Tensor | None,
    zero_start: bool,
    unit_start: bool = False,
) -> Tensor:
    """Advances X[rank : rank + count] [.., K, M] by the chunks `here`, in place; returns the writes D [.., C, M].

    `writes` is U, or None for the transition (V = 0). A start from zero or from I needs no product with W.
    """
    state = X[rank : rank + here.stop - here.start]
    W, Kd, end = local.W[here], local.Kd[here], local.end[here]
    if zero_start:
        assert writes is not None
        D = writes[here]
        torch.matmul(Kd.mT, D, out=state)
        return D
    if unit_start:
        D = W.neg()
    elif writes is None:
        D = torch.matmul(W, state).neg_()
    else:
        D = _baddbmm(writes[here], W, state, alpha=-1.0)
    state.mul_(end)
    _baddbmm_(state, Kd.mT, D)
    if writes is None:
        state.copy_(torch.nn.functional.hardshrink(state, _TINY))
    return D


def _baddbmm(base: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """base + alpha a b over two leading batch dimensions."""
    return torch.baddbmm(base.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), alpha=alpha).view(base.shape)


def _baddbmm_(base: Tensor, a: Tensor, b: Tensor) -> None:
    """base += a b over two leading batch dimensions; base is contiguous."""
    base.view(-1, *base.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


# ------------------------------------------------------------------------------------- packed tokens <-> chunk grid


@dataclass(frozen=True)
class _Grid:
    """B packed sequences laid out as chunks of one length.

    Sequences are ordered by falling length ("rank") and chunks by (position in the sequence, rank): the chunks that
    one scan step treats lie side by side, and so do the states they belong to.
    """

    chunk: int
    batch: int
    order: list[int] | None  # rank -> sequence; None: unchanged
    counts: list[int]  # per step, how many sequences still have a chunk
    rows: Tensor  # [chunks, C] long, CPU: token of every place (some valid token where there is none)
    valid: Tensor  # [chunks, C] bool, CPU
    block: int

    @classmethod
    def over(cls, cu_seqlens: Sequence[int] | Tensor, tokens: int, block_chunks) -> _Grid:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(x) for x in cu_seqlens]
        lengths = [b - a for a, b in zip(bounds, bounds[1:])]
        if not bounds or bounds[0] < 0 or bounds[-1] > tokens or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens must rise from >= 0 to <= {tokens} tokens, got {bounds}")
        C = max(1, min(CHUNK, max(lengths, default=1)))
        ranks = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        ordered = [lengths[i] for i in ranks]
        counts = []
        alive = len(ordered)
        for done in range(0, ordered[0] if ordered else 0, C):
            while ordered[alive - 1] <= done:
                alive -= 1
            counts.append(alive)
        start = torch.tensor([bounds[i] for i in ranks], dtype=torch.long)
        stop = torch.tensor([bounds[i + 1] for i in ranks], dtype=torch.long)
        first = torch.cat([start[:n] + C * step for step, n in enumerate(counts)]) if counts else start[:0]
        last = torch.cat([stop[:n] for n in counts]) if counts else stop[:0]
        rows = first[:, None] + torch.arange(C)
        valid = rows < last[:, None]
        rows = torch.minimum(rows, last[:, None] - 1)
        order = None if ranks == list(range(len(ranks))) else ranks
        return cls(C, len(lengths), order, counts, rows, valid, block_chunks(C))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of chunks to treat at once, in scan order."""
        total = self.rows.shape[0]
        for lo in range(0, total, self.block):
            yield lo, min(lo + self.block, total)

    def steps(self, lo: int, hi: int) -> Iterator[tuple[int, int, int, int]]:
        """The scan steps of a block: (step, first rank, first chunk within the block, number of chunks)."""
        begin = 0
        for step, count in enumerate(self.counts):
            a, b = max(lo, begin), min(hi, begin + count)
            if a < b:
                yield step, a - begin, a - lo, b - a
            begin += count

    def gather(self, x: Tensor, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """[N, H, ...] -> a new tensor [n, H, C, ...] in dtype, exactly 0 where there is no token."""
        rows, valid = self.rows[lo:hi].reshape(-1), self.valid[lo:hi]
        first, count = int(rows[0]), rows.numel()
        whole = bool(valid.all())
        if whole and int(rows[-1]) - first + 1 == count and bool((rows[1:] > rows[:-1]).all()):
            picked = x[first : first + count]
        else:
            picked = x.index_select(0, rows.to(x.device))
        picked = picked.view(hi - lo, self.chunk, *picked.shape[1:]).transpose(1, 2)
        # A copy always: callers work in place on what they get.
        out = torch.empty(picked.shape, dtype=dtype, device=x.device).copy_(picked)
        if not whole:
            empty = ~valid.to(x.device)
            out.masked_fill_(empty.view(hi - lo, 1, self.chunk, *(1,) * (out.dim() - 3)), 0.0)
        return out

    def scatter(self, out: Tensor, lo: int, hi: int, x: Tensor) -> None:
        """Writes x [n, H, C, V] to the tokens of chunks lo .. hi of out [N, H, V]."""
        flat = x.transpose(1, 2).flatten(0, 1)
        valid = self.valid[lo:hi].reshape(-1)
        rows = self.rows[lo:hi].reshape(-1)
        if not bool(valid.all()):
            kept = valid.nonzero().squeeze(1)
            flat, rows = flat.index_select(0, kept.to(x.device)), rows[kept]
        out.index_copy_(0, rows.to(out.device), flat.to(out.dtype))

    def sort(self, x: Tensor) -> Tensor:
        """[B, ...] by sequence -> by rank."""
        return x if self.order is None else x[self.order]

    def unsort(self, x: Tensor) -> Tensor:
        """[B, ...] by rank -> by sequence."""
        if self.order is None:
            return x
        out = torch.empty_like(x)
        out[self.order] = x
        return out
