"""Gated short convolution: a layer's work on rows of segment and composed requests.

Per channel, with `taps` weights w and the projections B_t, C_t and h_t of token t,

    x_t = B_t h_t
    y_t = C_t (b + sum_j w_j x_{t - taps + 1 + j})

The state is the last taps - 1 inputs x. A run of at least taps - 1 tokens overwrites the state: as an affine
map S_after = T S_before + S_zero, the run has T = 0, and a record holds S_zero alone, the run's last inputs.
Only the first taps - 1 rows of a segment depend on earlier tokens, and the seam recomputes these rows.

The convolution before Mamba1's scan is the same without gates: x is the projection itself, and y is SiLU of
the sum.

The package has two operators, each with one signature in `reference` (float64), `eager` (PyTorch) and
`triton.operators` (CUDA); `arguments`, `linear_layer.arguments` and `ops.program` define the arguments. Both
operators read and write vLLM's cache as the stock operator does, so a request may alternate between these and
the stock operator, in any number of passes.

`short_conv_segments(x, weights, caches, out, records, rows)`
    Runs rows of segment requests and writes each record's tail behind the interior's last row.

`short_conv_compose(x, weights, caches, out, records, rows, ops)`
    Runs rows of composed requests and applies records between them: the record's tail replaces the state in
    every mode that reads a record. Behind an island the state continues as behind any row.
"""

from __future__ import annotations

from .arguments import ShortConvInputs, ShortConvWeights

__all__ = ["ShortConvInputs", "ShortConvWeights"]
