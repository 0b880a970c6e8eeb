"""Linear attention whose states decay by numbers that no write changes: retention (arXiv:2307.08621), gated
linear attention (arXiv:2312.06635) and lightning attention (arXiv:2401.04658).

    S_i = Diag(e^{g_i}) S_{i-1} + k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

A segment leaves in such a layer its keys, not rotated, its values and its decays: composed, each key is
rotated at its position in the prompt and written with the decays of the tokens behind it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .delta import Rows
from .oracle import LinearState, Oracle
from .stream import Compose, Stream

UNSEEN = ("T_transposed", "no_conv_tail")
"""Faults that such layers do not show."""


@dataclass(frozen=True)
class Written(Rows):
    """A layer's rows, and what an interior leaves: unrotated `k [n, H, K]`, `v [n, H, V]`, `g [n, H, K]`."""

    k: Tensor
    v: Tensor
    g: Tensor


class Retention(Oracle):
    """What oracles with such layers have in common."""

    def faults(self) -> list[str]:
        return [fault for fault in super().faults() if fault not in UNSEEN]

    def _projected(self, index: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v by heads, and `g [n, H, K]`, of some axes perhaps 1."""
        raise NotImplementedError

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def _closed(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        """Outputs `y [n, H, V]` normalised, gated and projected."""
        raise NotImplementedError

    def _delta_net(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[None, Written], LinearState]:
        """A linear layer of a stream; its rows are what is written."""
        q, k, v, g = self._projected(index, x)
        g = g.expand_as(k)
        own = torch.arange(len(x)) if fault == "stream_positions" else torch.tensor(stream.positions)
        queries, keys, outputs = self._turned(q, own) / q.shape[-1] ** 0.5, self._turned(k, own), []

        def run(state: LinearState, begin: int, end: int) -> LinearState:
            S = state.S
            for t in range(begin, end):
                S = g[t].exp()[..., None] * S + keys[t][..., None] * v[t][:, None]
                outputs.append(torch.einsum("hk,hkv->hv", queries[t], S))
            return LinearState(S, state.conv)

        state = LinearState(x.new_zeros(*k.shape[1:], v.shape[-1]), x.new_zeros(0))
        state = self._walk(index, stream, state, run, fault, compose_T)
        return self._closed(index, x, torch.stack(outputs)), (None, Written(k, v, g)), state

    def _summary(self, _: None, rows: Written, lo: int, hi: int) -> Written:
        return rows.rows(lo, hi)

    def _compose(
        self, state: LinearState, index: int, compose: Compose, fault: str | None, compose_T: bool
    ) -> LinearState:
        """The interior's tokens written, each at its position; without `compose_T` what was there stays."""
        lo = 0 if fault == "state_over_head" else compose.lo
        record = self._record(compose.tokens, lo, compose.hi)[index]
        at = torch.arange(lo, compose.hi) + (0 if fault == "states_not_moved" else compose.start)
        total = record.g.sum(0)
        behind = (total - record.g.cumsum(0)).exp()
        S = torch.einsum("nhk,nhv->hkv", behind * self._turned(record.k, at), record.v)
        if fault != "forget_left":
            S = S + (state.S if fault == "no_T" or not compose_T else total.exp()[..., None] * state.S)
        return LinearState(S, state.conv)
