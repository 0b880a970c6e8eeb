"""Gates as exact as float32's, and the decays between rows of a chunk."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x), to a few units in the last place; NaN stays NaN."""
    # With u = e^-|x| in (0, 1], log(1 + u) = 2 atanh(s) for s = u / (2 + u) <= 1/3: eight terms of its
    # series. A logarithm of 1 + u would lose what u has below 1's last place, most of it for a small u.
    u = tl.exp(-tl.abs(x))
    s = u / (u + 2.0)
    t = s * s
    p = 2.0 / 15
    p = p * t + 2.0 / 13
    p = p * t + 2.0 / 11
    p = p * t + 2.0 / 9
    p = p * t + 2.0 / 7
    p = p * t + 2.0 / 5
    p = p * t + 2.0 / 3
    return tl.where(x < 0.0, 0.0, x) + (p * t * s + s + s)


@triton.jit
def decay(later, earlier):
    """e^{later - earlier} of sums of gates in float64, at most 1; NaN stays NaN."""
    # Differences of float32 parts: float64 arithmetic is for the C sums, not for their C^2 differences.
    later_high, earlier_high = later.to(tl.float32), earlier.to(tl.float32)
    later_low = (later - later_high.to(tl.float64)).to(tl.float32)
    earlier_low = (earlier - earlier_high.to(tl.float64)).to(tl.float32)
    between = (later_high - earlier_high) + (later_low - earlier_low)
    return tl.exp(tl.where(between > 0.0, 0.0, between))
