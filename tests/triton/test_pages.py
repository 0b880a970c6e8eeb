"""Copies between the pool's slots and contiguous memory."""

from __future__ import annotations

import pytest
import torch

from vllm_hypic.backends.ops.span_attention.triton.pages import gather_slots, scatter_slots

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@DTYPES
@pytest.mark.parametrize(("kv_heads", "size"), [(1, 16), (2, 72), (8, 256)])
def test_there_and_back(kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, what is no number included; other slots stay as they are."""
    rng = torch.Generator().manual_seed(size)
    shape = (25, kv_heads, size)
    pool_key, pool_value = (torch.randn(shape, generator=rng).to(dtype).to(device) for _ in range(2))
    pool_key[3, 0, 5] = float("nan")
    slots = torch.tensor([3, 24, 7, 8, 9, 0], device=device)
    key, value = (torch.empty(6, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    gather_slots(pool_key, pool_value, slots, key, value)
    assert torch.equal(bits(key), bits(pool_key.index_select(0, slots)))
    assert torch.equal(bits(value), bits(pool_value.index_select(0, slots)))

    new_key, new_value = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    wanted_key = new_key.index_copy(0, slots, key)
    wanted_value = new_value.index_copy(0, slots, value)
    scatter_slots(new_key, new_value, slots, key, value)
    assert torch.equal(bits(new_key), bits(wanted_key)) and torch.equal(bits(new_value), bits(wanted_value))


def test_no_slots(device: torch.device) -> None:
    pool, nothing = torch.zeros(3, 1, 16, device=device), torch.zeros(0, 1, 16, device=device)
    gather_slots(pool, pool, torch.zeros(0, dtype=torch.int64, device=device), nothing, nothing)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pool_value": torch.zeros(4, 2, 16)}, r"pool_value \(4, 2, 16\): expected \(5, 2, 16\)"),
        ({"key": torch.zeros(2, 2, 16)}, r"key \(2, 2, 16\): expected \(3, 2, 16\)"),
        ({"value": torch.zeros(3, 2, 16).half()}, "of one dtype"),
        ({"value": torch.zeros(3, 2, 32)[..., :16]}, "expected contiguous tensors"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, torch.Tensor], says: str) -> None:
    given = {
        "pool_key": torch.zeros(5, 2, 16),
        "pool_value": torch.zeros(5, 2, 16),
        "slots": torch.arange(3),
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        **change,
    }
    with pytest.raises(ValueError, match=says):
        gather_slots(**given)
