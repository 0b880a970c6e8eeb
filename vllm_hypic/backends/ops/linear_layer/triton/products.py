"""Matrix products as exact as float32's, on tensor cores, where one side has few significant bits.

TF32, with 11 significant bits, holds all bf16 and fp16 numbers. A product of such numbers with a float32
matrix needs the matrix in two TF32 parts, so two products; `tf32x3` always takes three.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _high(x):
    """x rounded to TF32's 11 significant bits."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def add_times(few, x, to):
    """to + few @ x: `few` [m, k] bf16, fp16 or float32, x [k, n] and `to` float32."""
    if few.dtype == tl.float32:
        product = tl.dot(few, x, acc=to, input_precision="tf32x3")
    else:
        wide, high = few.to(tl.float32), _high(x)
        product = tl.dot(wide, x - high, acc=to, input_precision="tf32")
        product = tl.dot(wide, high, acc=product, input_precision="tf32")
    return product


@triton.jit
def add_times_few(x, few, to):
    """to + x @ few: x [m, k] and `to` float32, `few` [k, n] bf16, fp16 or float32."""
    if few.dtype == tl.float32:
        product = tl.dot(x, few, acc=to, input_precision="tf32x3")
    else:
        wide, high = few.to(tl.float32), _high(x)
        product = tl.dot(x - high, wide, acc=to, input_precision="tf32")
        product = tl.dot(high, wide, acc=product, input_precision="tf32")
    return product


@triton.jit
def add_times_roughly(few, x, to):
    """to + few @ x for results in the type of `few`: for 16-bit types x is rounded to TF32."""
    if few.dtype == tl.float32:
        product = tl.dot(few, x, acc=to, input_precision="tf32x3")
    else:
        product = tl.dot(few.to(tl.float32), x, acc=to, input_precision="tf32")
    return product
