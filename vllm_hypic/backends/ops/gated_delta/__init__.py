"""Gated delta rule: a layer's work on rows that position-independent caching treats itself.

Per value head the state S [K, V] follows, token by token,

    S  <-  e^{g_t} S
    d   =  beta_t (v_t - S^T k_t)
    S  <-  S + k_t d^T              that is  S_t = (I - beta_t k_t k_t^T) e^{g_t} S_{t-1} + beta_t k_t v_t^T
    o_t =  S^T q_t

with k_t and q_t l2-normalised over K and q_t scaled by K^-1/2. A run of tokens is therefore the affine map
S_after = T S_before + S_zero with T [K, K] the product of the per-token factors. q, k and v are SiLU of a
causal convolution over token rows, g = -e^{A_log} softplus(a + dt_bias), beta = sigmoid(b), or
twice that (`largest_beta`): up to 2 no factor's norm exceeds 1.

In Kimi delta attention (KDA) every channel of K has its own g_t, which stands for a diagonal matrix: e^{g_t}
is then Diag(e^{g_t}), and all else is as above. It has a second kind of gate, bounded below (`gate_bound`).

Two operators, each with one signature in `reference` (float64), `torch`, `native` (C++) and
`triton.operators` (CUDA); `arguments` and `ops.program` say what they take, `linear_layer.triton.plan` how
CUDA layers share a step's planning.
Both read and write vLLM's caches as the stock operator does, so a request may go on from one to the other, in
any number of passes.

`gdn_segments(x, weights, caches, out, records, rows, carries, dead_below)`
    Rows of segment requests: one scan gives outputs, running state and, of the interior, T and the record.

    The record's state is S_zero = S_end - T S_head, S_head being the state at the interior's start: no scan
    of its own. Once all elements of a head's T are below `dead_below` the head is dead: T counts as zero, is
    computed no further and not stored, and `block_of` becomes -1. T of the others goes to the transition
    blocks that `block_of` names.

`gdn_compose(x, weights, caches, out, records, rows, ops)`
    Rows of composed requests, with records applied between them.

`chunk` holds the closed form in PyTorch. All modules import torch only, but those in `triton`, the kernels.
"""

from __future__ import annotations

from types import ModuleType

from . import limits, native
from . import torch as torch_ops
from .arguments import DEAD_BELOW, Caches, Carry, Inputs, Records, Weights
from .chunk import seam_outputs, segment_summary
from .reference import l2_eps

__all__ = [
    "DEAD_BELOW",
    "Caches",
    "Carry",
    "Inputs",
    "Records",
    "Weights",
    "choose",
    "l2_eps",
    "refuses",
    "seam_outputs",
    "segment_summary",
]


def choose(weights: Weights, caches: Caches) -> ModuleType:
    """The fastest module of the two operators that serves this layer."""
    if refuses(weights, caches):
        return torch_ops
    if caches.state.device.type == "cpu":
        return native
    # Only where it serves: CPU installations have no Triton.
    from .triton import operators

    return operators


def refuses(weights: Weights, caches: Caches) -> str | None:
    """Why the kernels for the caches' device (CPU: C++, CUDA: Triton) do not serve this layer, or `None`."""
    on_cuda = caches.state.device.type == "cuda"
    return limits.refuses(weights, caches) if on_cuda else native.refuses(weights, caches)
