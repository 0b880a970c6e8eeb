"""Linear attention whose states decay by what their writes do not change: lightning attention and retention
(a constant a head), gated linear attention (a gate of every channel).

Per head the state S [K, V] follows, token by token,

    S  <-  Diag(e^{g_t}) S + k_t v_t^T
    y_t =  S^T q_t

with log decays g_t <= 0 [K], or one constant g of all channels. A run of tokens is therefore the affine map
S_after = T S_before + S_zero with T = Diag(e^{g_1 + ... + g_n}). T underflows in long runs, so log T is what
is kept, a number a head where decays are constant.

q and k may be rotated by their positions before they come here. Rotation by position p is a linear map R(p)
of the K axis with R(p) R(d) = R(p + d), and it commutes with a decay that all channels share. So the state of
a run at positions d further on is R(d) S_zero, and a record of such a layer fits any position: see
`Relocation`. Where channels decay apart, rotation does not commute, and there is none.

Two operators, each with one signature in `reference` (float64), `torch` and `native` (C++); `arguments` and
`ops.program` say what they take. Both read and write vLLM's cache as a stock operator does, so a request may
go on from one to the other, in any number of passes.

`decay_attention_segments(x, caches, out, records, rows, carries)`
    Rows of segment requests: outputs, running state and, of the interior, log T and the record, whose state
    is a second scan from zero by the same terms: what tokens add to a state does not depend on it. A
    leading record's state is the running one, and its log T is -inf.

`decay_attention_compose(x, caches, out, records, rows, ops, relocation)`
    Rows of composed requests, with records applied between them; or of any others, with none.

`out` [rows, H, V] is what the layer's norm and gate take.
"""

from __future__ import annotations

from types import ModuleType

from . import native
from . import torch as torch_ops
from .arguments import Caches, Carry, Inputs, Records, Relocation

__all__ = ["Caches", "Carry", "Inputs", "Records", "Relocation", "choose"]


def choose(x: Inputs, caches: Caches) -> ModuleType:
    """The fastest module of the two operators that serves this layer."""
    return torch_ops if native.refuses(x.q.dtype, caches.state) else native
