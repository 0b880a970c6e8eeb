"""Gated delta rule: a layer's work on rows of segment and composed requests.

Per value head the state S [K, V] follows, token by token,

    S  <-  e^{g_t} S
    d   =  beta_t (v_t - S^T k_t)
    S  <-  S + k_t d^T              that is  S_t = (I - beta_t k_t k_t^T) e^{g_t} S_{t-1} + beta_t k_t v_t^T
    o_t =  S^T q_t

with k_t and q_t l2-normalised over K and q_t scaled by K^-1/2. A run of tokens is therefore the affine map
S_after = T S_before + S_zero with T [K, K] the product of the per-token factors. q, k and v are SiLU of a
causal convolution over token rows, g = -e^{A_log} softplus(a + dt_bias), beta = sigmoid(b), or 2 sigmoid(b)
(`largest_beta`): for beta up to 2, the norm of no factor exceeds 1.

In Kimi delta attention (KDA) every channel of K has its own gate: e^{g_t} becomes Diag(e^{g_t}), and all
other equations hold. KDA also has a second kind of gate, which is bounded below (`gate_bound`).

The package has two operators, each with one signature in `reference` (float64), `eager` (PyTorch), `native`
(C++) and `triton.operators` (CUDA). `arguments`, `linear_layer.arguments` and `ops.program` define the
arguments; `linear_layer.triton.plan` says how CUDA layers share a step's planning. Both operators read and
write vLLM's caches as the stock operator does, so a request may alternate between these and the stock
operator, in any number of passes.

`gdn_segments(x, weights, caches, out, records, rows, carries, dead_below)`
    Runs rows of segment requests: one scan gives outputs, the running state and, for the interior, T and the
    record.

    The record's state is S_zero = S_end - T S_head, with the state S_head at the interior's start, and needs
    no scan of its own. A head whose elements of T are all below `dead_below` is dead: its T counts as zero,
    is neither computed further nor stored, and `block_of` becomes -1. T of each live head goes to the
    transition block that `block_of` names.

`gdn_compose(x, weights, caches, out, records, rows, ops)`
    Runs rows of composed requests and applies records between them.

`chunk` holds the closed form in PyTorch. Only modules in `triton`, the kernels, import more than torch.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..linear_layer.arguments import LayerCaches
from . import eager, limits, native
from .arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaInputs, GatedDeltaRecords, GatedDeltaWeights
from .chunk import seam_outputs, segment_summary
from .reference import l2_eps

__all__ = [
    "DEAD_BELOW",
    "GatedDeltaCarry",
    "GatedDeltaInputs",
    "GatedDeltaRecords",
    "GatedDeltaWeights",
    "choose",
    "l2_eps",
    "refuses",
    "seam_outputs",
    "segment_summary",
]


def choose(weights: GatedDeltaWeights, caches: LayerCaches, inputs: torch.dtype | None = None) -> ModuleType:
    """Return the fastest module of the two operators that serves this layer."""
    if refuses(weights, caches, inputs):
        return eager
    if caches.state.device.type == "cpu":
        return native
    # CPU installations have no Triton: only layers that it serves import it.
    from .triton import operators

    return operators


def refuses(weights: GatedDeltaWeights, caches: LayerCaches, inputs: torch.dtype | None = None) -> str | None:
    """Return why the kernels for the caches' device (CPU: C++, CUDA: Triton) do not serve this layer, or
    `None` if they do.  `inputs`: dtype of the layer's inputs; `None`: that of the convolution's cache."""
    on_cuda = caches.state.device.type == "cuda"
    return limits.refuses(weights, caches) if on_cuda else native.refuses(weights, caches, inputs)
