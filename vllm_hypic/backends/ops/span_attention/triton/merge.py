"""The merge of the public part of attention into the private part, in place, as a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 4096
"""Numbers of the public part, and of the private part, that a program holds in registers.  The number limits
the rows of one head per program; the maximum is 16 rows."""


# The numbers of rows and tokens change in each step: no variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "lse_head_stride"])
def merge_kernel(
    output,
    output_lse,
    other,
    other_lse,
    token_rows,
    rows,
    output_stride,
    output_head_stride,
    lse_stride,
    lse_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, head): rows ``i * ROWS ...`` of ``other``, merged into those of ``output``."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    ours = place < rows
    token = tl.load(token_rows + place, mask=ours, other=-1).to(tl.int64)
    ours = token >= 0
    place = place.to(tl.int64)
    private = tl.load(output_lse + place * lse_stride + head * lse_head_stride, mask=ours, other=0.0)
    place = place * HEADS + head
    # Some releases of FlashAttention say +inf where a row has no keys.
    private = tl.where(private == float("inf"), float("-inf"), private)
    public = tl.load(other_lse + place, mask=ours, other=0.0)
    highest = tl.maximum(private, public)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    private_weight, public_weight = tl.exp(private - base), tl.exp(public - base)
    total = private_weight + public_weight
    total = tl.where(total == 0, 1.0, total)

    dimension = tl.arange(0, SIZE_TILE)
    inside = ours[:, None] & (dimension < SIZE)[None, :]
    at = output + token[:, None] * output_stride + head * output_head_stride + dimension[None, :]
    # An empty part weighs nothing, also where it is not a number.
    private_out = tl.load(at, mask=inside & (private > float("-inf"))[:, None], other=0.0).to(tl.float32)
    public_out = tl.load(
        other + place[:, None] * SIZE + dimension[None, :],
        mask=inside & (public > float("-inf"))[:, None],
        other=0.0,
    )
    merged = private_out * private_weight[:, None] + public_out * public_weight[:, None]
    tl.store(at, (merged / total[:, None]).to(output.dtype.element_ty), mask=inside)


def rows_at_once(size: int) -> int:
    """Return the rows of one head of this size that a program takes."""
    return min(16, NUMBERS // triton.next_power_of_2(size))


def merge_rows_(
    output: torch.Tensor,
    output_lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    token_rows: torch.Tensor,
) -> None:
    """Merge row ``i`` of ``other`` into row ``token_rows[i]`` of ``output``, in place.

    ``output [tokens, heads, size]``, heads contiguous; ``other [rows, heads, size]`` and
    ``other_lse [rows, heads]`` float32, contiguous.  ``token_rows [rows]`` int32, no number twice; a number
    below zero leaves the row out.  ``output_lse [rows, heads]`` float32 with any strides, also
    FlashAttention's ``[heads, rows]`` transposed.  A log-sum-exp of -inf, or +inf in ``output_lse``, marks a
    part without columns. Raises ``ValueError`` for other shapes.
    """
    rows, heads, size = other.shape
    if output.dim() != 3 or tuple(output.shape[1:]) != (heads, size) or output.stride(2) != 1:
        raise ValueError(f"output {tuple(output.shape)}: expected contiguous [..., {heads}, {size}]")
    if tuple(output_lse.shape) != (rows, heads) or output_lse.dtype != torch.float32:
        found = f"{tuple(output_lse.shape)} {output_lse.dtype}"
        raise ValueError(f"output_lse {found}: expected {(rows, heads)} float32")
    if tuple(other_lse.shape) != (rows, heads) or len(token_rows) != rows:
        found = f"{tuple(other_lse.shape)}, {len(token_rows)} token rows"
        raise ValueError(f"other_lse {found}: expected {rows} rows")
    if not (other.is_contiguous() and other_lse.is_contiguous()):
        raise ValueError("other, other_lse: expected contiguous tensors")
    if not rows:
        return
    block = rows_at_once(size)
    merge_kernel[(triton.cdiv(rows, block), heads)](
        output,
        output_lse,
        other,
        other_lse,
        token_rows,
        rows,
        output.stride(0),
        output.stride(1),
        output_lse.stride(0),
        output_lse.stride(1),
        HEADS=heads,
        SIZE=size,
        SIZE_TILE=triton.next_power_of_2(size),
        ROWS=block,
        num_warps=4,
    )
