"""Copies of a record's public K and V between pool slots and contiguous memory, as one Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kernel_spec import KernelSpec

BLOCK = 1024
"""Elements of one slot that a program copies."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def copy_slots_kernel(
    pool_key,
    pool_value,
    key,
    value,
    slots,
    WIDTH: tl.constexpr,
    INTO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, j): block ``j`` of the ``WIDTH`` elements of row ``i`` and its slot, of K and of V."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    in_pool, outside = slot * WIDTH + column, row * WIDTH + column
    if INTO_POOL:
        tl.store(pool_key + in_pool, tl.load(key + outside, mask=inside), mask=inside)
        tl.store(pool_value + in_pool, tl.load(value + outside, mask=inside), mask=inside)
    else:
        tl.store(key + outside, tl.load(pool_key + in_pool, mask=inside), mask=inside)
        tl.store(value + outside, tl.load(pool_value + in_pool, mask=inside), mask=inside)


def gather_slots(
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Copy ``pool_key[slots]`` to ``key`` and ``pool_value[slots]`` to ``value``, bit for bit.

    Pools ``[all slots, kv_heads, size]``; ``slots [n]`` integers on the device; ``key``, ``value
    [n, kv_heads, size]``.  All contiguous and of one dtype.  Raises ``ValueError`` otherwise; slots are not
    checked.
    """
    _copy(pool_key, pool_value, slots, key, value, into_pool=False)


def scatter_slots(
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Copy back as the inverse of :func:`gather_slots`: ``pool_key[slots] = key``,
    ``pool_value[slots] = value``; no slot may occur twice."""
    _copy(pool_key, pool_value, slots, key, value, into_pool=True)


def _copy(
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    into_pool: bool,
) -> None:
    shape = (len(slots), *pool_key.shape[1:])
    if tuple(pool_value.shape) != tuple(pool_key.shape):
        raise ValueError(
            f"pool_value {tuple(pool_value.shape)}: expected {tuple(pool_key.shape)}, like pool_key"
        )
    for name, given in (("key", key), ("value", value)):
        if tuple(given.shape) != shape:
            raise ValueError(f"{name} {tuple(given.shape)}: expected {shape}")
    tensors = (pool_key, pool_value, key, value)
    if len({t.dtype for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("pool_key, pool_value, key, value: expected contiguous tensors of one dtype")
    width = pool_key[0].numel() if len(pool_key) else 0
    if not len(slots) or not width:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    copy_slots_kernel[(len(slots), triton.cdiv(width, block))](
        pool_key,
        pool_value,
        key,
        value,
        slots,
        WIDTH=width,
        INTO_POOL=into_pool,
        BLOCK=block,
        num_warps=4,
    )


SPECS = (
    KernelSpec(
        "copy_slots",
        copy_slots_kernel,
        {**dict.fromkeys(("pool_key", "pool_value", "key", "value"), "*bf16"), "slots": "*i64"},
        {"WIDTH": 8 * 128, "INTO_POOL": True, "BLOCK": BLOCK},
        warps=4,
        stages=3,
        aligned=("pool_key", "pool_value", "key", "value"),
    ),
)
