"""Linear attention whose states decay independently of the tokens' writes: lightning attention and retention
(a constant per head), gated linear attention (a gate per channel).

Per head the state S [K, V] follows, token by token,

    S  <-  Diag(e^{g_t}) S + k_t v_t^T
    y_t =  S^T q_t

with log decays g_t <= 0 [K], or one constant g for all channels. A run of tokens is therefore the affine map
S_after = T S_before + S_zero with T = Diag(e^{g_1 + ... + g_n}). T underflows in long runs, so records keep
log T, one number per head where decays are constant.

The layer may rotate q and k by their positions before it calls the operators. Rotation by position p is a
linear map R(p) of the K axis with R(p) R(d) = R(p + d), and commutes with a decay that all channels share. A
run at positions d further on therefore has the state R(d) S_zero, and a record of such a layer fits any
position: see `Relocation`. Where each channel decays by its own gate, rotation does not commute with the
decay, and `relocation` must be `None`.

The package has two operators, each with one signature in `reference` (float64), `eager` (PyTorch) and
`native` (C++); `arguments`, `linear_layer.arguments` and `ops.program` define the arguments. Both operators
read and write vLLM's cache as a stock operator does, so a request may alternate between these and stock
operators, in any number of passes.

`decay_attention_segments(x, caches, out, records, rows, carries)`
    Runs rows of segment requests: writes outputs, the running state and, for the interior, log T and the
    record. A second scan from zero by the same terms gives the record's state, for the terms that tokens add
    do not depend on the state. A leading record holds the running state, and log T = -inf.

`decay_attention_compose(x, caches, out, records, rows, ops, relocation)`
    Runs rows of composed requests and applies records between them, or runs rows of requests without records.

The layer's norm and gate take `out` [rows, H, V].

"""

from __future__ import annotations

from types import ModuleType

from ..linear_layer.arguments import StateCaches
from . import eager, native
from .arguments import DecayAttentionCarry, DecayAttentionInputs, DecayAttentionRecords, Relocation

__all__ = ["DecayAttentionCarry", "DecayAttentionInputs", "DecayAttentionRecords", "Relocation", "choose"]


def choose(x: DecayAttentionInputs, caches: StateCaches) -> ModuleType:
    """Return the fastest module of the two operators that serves this layer."""
    return eager if native.refuses(x.q.dtype, caches.state) else native
