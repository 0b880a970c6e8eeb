"""Gated delta rule over packed sequences: segment summaries (T, S) and seam outputs.

Per value head the state S [K, V] follows, token by token,

    S  <-  e^{g_t} S
    d   =  beta_t (v_t - S^T k_t)
    S  <-  S + k_t d^T              that is  S_t = (I - beta_t k_t k_t^T) e^{g_t} S_{t-1} + beta_t k_t v_t^T
    o_t =  S^T q_t

with k_t and q_t l2-normalised over K and q_t scaled by K^-1/2. A run of tokens is therefore the affine map
S_after = T S_before + S_zero with T [K, K] the product of the per-token factors.

`chunk` holds the operators the engine calls (closed form, fp32), `reference` the same functions as a token
loop in float64. Both import torch only.
"""

from vllm_hypic.backends.ops.gated_delta.chunk import seam_outputs, segment_summary
from vllm_hypic.backends.ops.gated_delta.reference import l2_eps

__all__ = ["l2_eps", "seam_outputs", "segment_summary"]
