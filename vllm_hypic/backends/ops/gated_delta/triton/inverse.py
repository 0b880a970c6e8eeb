"""(I + L)^-1 of a chunk of the delta rule.

Forward substitution inverts the diagonal blocks of 16 rows. With X the inverse of the blocks and B the part
of L below the blocks, the inverse of 32 rows is X - X B X. The algorithm takes no powers of L: powers grow
without bound where keys are alike.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(L, N: tl.constexpr):
    """(I + L)^-1 of L [N, N], zero on and above its diagonal; N: 16 or 32."""
    BLOCKS: tl.constexpr = N // 16
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    by_block = tl.reshape(L, (BLOCKS, 16, BLOCKS, 16))
    diagonal = tl.sum(tl.where(same, by_block, 0.0), axis=2)
    row = tl.arange(0, 16)
    eye = (row[:, None] == row[None, :]).to(tl.float32)
    X = tl.zeros([BLOCKS, 16, 16], tl.float32) + eye[None, :, :]
    for i in range(1, 16):
        here = (row == i)[None, :, None]
        factors = tl.sum(tl.where(here, diagonal, 0.0), axis=1)
        X -= tl.where(here, tl.sum(factors[:, :, None] * X, axis=1)[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), (N, N))
    if BLOCKS > 1:
        at = tl.arange(0, N)
        below = (at >= 16)[:, None] & (at < 16)[None, :]
        inverse -= _product(_product(inverse, tl.where(below, L, 0.0)), inverse)
    return inverse


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")
