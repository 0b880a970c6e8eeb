"""Functions that attention kernels share for all kinds of columns: read an item of the plan, update softmax,
and write results.

``../plan.py`` explains the fields of an item.  Softmax is online and in base 2.  A whole tile writes ``out``
and ``lse`` (natural logarithm); a split tile writes its rows of ``part_out`` and ``part_lse`` (base 2).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_rows(item):
    """What an item says of rows: the request's first of the query and of the results, how many it has, and
    the item's first folded row."""
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


@triton.jit
def load_range(item):
    """What an item says of columns: the request's first, those of the item, and its first partial result."""
    return tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)


@triton.jit
def turn(a, b, cos, sin):
    """Both members of pairs, rotated, in the type that they had."""
    first = (a.to(tl.float32) * cos - b.to(tl.float32) * sin).to(a.dtype)
    second = (b.to(tl.float32) * cos + a.to(tl.float32) * sin).to(a.dtype)
    return first, second


@triton.jit
def weigh(scores, highest, total):
    """Weights of ``scores [rows, columns]``, by how much earlier sums shrink, and the new largest score and
    sum of weights of each row."""
    raised = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet: any finite number will do, its weights are 0 all the same.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    return weights, shrink, raised, total * shrink + tl.sum(weights, 1)


@triton.jit
def store_results(
    sums,
    highest,
    total,
    ours,
    at,
    at_partial,
    first_partial,
    out,
    lse,
    part_out,
    part_lse,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
):
    """Write the rows that are ``ours``: of a split tile, whose ``first_partial`` is not negative, to places
    ``at_partial`` of the partial results, of another to places ``at``."""
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    result = sums / total[:, None]
    result_lse = tl.where(blind, float("-inf"), highest + tl.log2(total))
    dimension = tl.arange(0, SIZE_TILE)
    inside = ours[:, None] & (dimension < SIZE)[None, :]
    if first_partial < 0:
        tl.store(out + at[:, None] * SIZE + dimension[None, :], result, mask=inside)
        tl.store(lse + at, result_lse / LOG2_E, mask=ours)
    else:
        tl.store(part_out + at_partial[:, None] * SIZE + dimension[None, :], result, mask=inside)
        tl.store(part_lse + at_partial, result_lse, mask=ours)
