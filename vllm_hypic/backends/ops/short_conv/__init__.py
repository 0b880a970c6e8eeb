"""Gated short convolution: a layer's work on rows that position-independent caching treats itself.

Per channel, with `taps` weights w and what the layer's projection made of token t, B_t, C_t and h_t,

    x_t = B_t h_t
    y_t = C_t (b + sum_j w_j x_{t - taps + 1 + j})

The state is the last taps - 1 inputs x. A run of at least so many tokens overwrites it: as an affine map
S_after = T S_before + S_zero it has T = 0, and S_zero, the inputs of its last tokens, is all that a record
holds. Whatever stood before a segment is seen by its first taps - 1 rows alone, which a seam recomputes.

The convolution in front of Mamba1's scan is the same without gates: x is the projection's, and y is SiLU of
the sum.

Two operators, each with one signature in `reference` (float64), `torch` and `triton.operators` (CUDA);
`arguments` and `ops.program` say what they take. Both read and write vLLM's cache as the stock operator does,
so a request may go on from one to the other, in any number of passes.

`short_conv_segments(x, weights, caches, out, records, rows)`
    Rows of segment requests, which leave the record behind the interior's last row.

`short_conv_compose(x, weights, caches, out, records, rows, ops)`
    Rows of composed requests, with records applied between them: the state becomes the record's, whatever the
    mode. Behind an island it goes on as behind any row.
"""

from __future__ import annotations

from .arguments import Caches, Inputs, Records, Weights

__all__ = ["Caches", "Inputs", "Records", "Weights"]
