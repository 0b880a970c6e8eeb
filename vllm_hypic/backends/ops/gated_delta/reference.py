"""Gated delta rule as a plain token loop in float64: what `chunk` is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def l2_eps(device: torch.device) -> float:
    """The epsilon vLLM 0.32 adds to sum(x^2) when it l2-normalises q and k.

    Its CPU operators (prefill, decode and multi-token alike) use 1e-5, its CUDA kernels 1e-6. A record must
    be computed with the value of the engine that reads it: for keys of norm 1e-2 the two differ by 4 %.
    """
    return 1e-5 if device.type == "cpu" else 1e-6


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
    """Same arguments and meaning as `chunk.segment_summary`; returns float64."""
    eps = l2_eps(k.device) if eps is None else eps
    bounds = [int(x) for x in cu_seqlens]
    batch, heads, width = len(bounds) - 1, v.shape[1], k.shape[2]
    key = _expand(_l2norm(k.double(), eps), heads)
    state = _start(initial_S, (batch, heads, width, v.shape[2]), k.device)
    if initial_T is not None:
        transition = initial_T.double().clone()
    else:
        eye = torch.eye(width, dtype=torch.float64, device=k.device)
        transition = eye.expand(batch, heads, -1, -1).clone()
    zero = torch.zeros(heads, width, dtype=torch.float64, device=k.device)
    for b, (lo, hi) in enumerate(pairwise(bounds)):
        for t in range(lo, hi):
            state[b] = _step(state[b], key[t], v[t].double(), g[t].double(), beta[t].double())
            if need_T:
                # T obeys the recurrence of the state itself with v = 0: its columns are states.
                transition[b] = _step(transition[b], key[t], zero, g[t].double(), beta[t].double())
    return (transition if need_T else None), state


def seam_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_states: Tensor,
    *,
    need_states: bool = True,
    eps: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and meaning as `chunk.seam_outputs`; returns float64."""
    eps = l2_eps(k.device) if eps is None else eps
    bounds = [int(x) for x in cu_seqlens]
    heads, width = v.shape[1], k.shape[2]
    key = _expand(_l2norm(k.double(), eps), heads)
    query = _expand(_l2norm(q.double(), eps), heads) * width**-0.5
    state = initial_states.double().clone()
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for b, (lo, hi) in enumerate(pairwise(bounds)):
        for t in range(lo, hi):
            state[b] = _step(state[b], key[t], v[t].double(), g[t].double(), beta[t].double())
            out[t] = torch.einsum("hk,hkv->hv", query[t], state[b])
    return out, (state if need_states else None)


def _step(state: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token: state [H, K, V], key [H, K], value [H, V], g and beta [H]."""
    state = state * g.exp()[:, None, None]
    write = beta[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
    return state + key[:, :, None] * write[:, None, :]


def _l2norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _expand(x: Tensor, heads: int) -> Tensor:
    """[N, Hk, K] -> [N, heads, K]; value head h reads key head h // (heads / Hk)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _start(initial: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if initial is None:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    return initial.double().clone()
