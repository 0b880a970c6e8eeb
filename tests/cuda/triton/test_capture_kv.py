"""Capture of K and V in Triton against float64 and the PyTorch operator, and copies of the pool's slots."""

from typing import Any

import pytest
import torch
from backends.cases import cos_sin_table
from span_cases import on

from vllm_hypic.backends.ops.span_attention.eager import unrotate
from vllm_hypic.backends.ops.span_attention.reference import unrotate_reference
from vllm_hypic.backends.ops.span_attention.triton.capture import capture_

zeros = torch.zeros

TOLERANCE = {torch.float32: 5e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of a pair, relative to its largest member: one rounding; in float32 some."""
TOKENS, SLOTS = 50, 90


def nan(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (64, 0), (96, 96), (72, 48), (128, 2), (256, 64)])
def test_rotation_is_undone(
    size: int, rotary: int, neox: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(size + rotary)
    kv_heads, count = 2, 37
    key, value = (nan(TOKENS, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    pool_key, pool_value = (nan(SLOTS, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    rows = torch.randperm(TOKENS, generator=rng)[:count]
    slots = torch.randperm(SLOTS, generator=rng)[:count]
    positions = torch.randint(0, 1000, (count,), generator=rng)
    # A table with an mscale, rounded like the model: both must be undone.
    table = (1.3 * cos_sin_table(rotary, torch.float32)).to(dtype) if rotary else None
    given = torch.randn(2, count, kv_heads, size, generator=rng).to(dtype)
    key[rows], value[rows] = given[0].to(device), given[1].to(device)
    capture_(key, value, pool_key, pool_value, *on(device, [rows, slots, positions, table]), neox)

    assert torch.equal(pool_value[slots].cpu(), given[1])
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, slots, False)
    assert pool_key[others].isnan().all() and pool_value[others].isnan().all()
    captured = pool_key[slots].cpu()
    wanted = unrotate_reference(given[0], table, positions, neox)
    error = (captured.double() - wanted).abs()
    assert float(error[..., rotary:].max() if rotary < size else 0.0) == 0
    if rotary:
        pairs = wanted[..., :rotary]
        pairs = pairs.unflatten(-1, (2, -1) if neox else (-1, 2))
        largest = pairs.abs().amax(-2 if neox else -1, keepdim=True).expand_as(pairs).flatten(-2)
        assert float((error[..., :rotary] / largest).max()) <= TOLERANCE[dtype]
    # The same arithmetic as on the CPU, but for fused multiply-adds: seldom another rounding.
    same = unrotate(given[0], table, positions, neox) == captured
    assert float(same.float().mean()) > (0.2 if dtype == torch.float32 else 0.98)


def test_rows_of_a_fused_projection(device: torch.device) -> None:
    """K and V as slices of one tensor, an index that begins anywhere."""
    fused = torch.randn(20, 6, 32, generator=torch.Generator().manual_seed(0)).to(device)
    pool_key, pool_value = (nan(30, 2, 32, dtype=torch.float32, device=device) for _ in range(2))
    rows, slots = torch.arange(21, device=device)[2:20], torch.arange(31, device=device)[5:23]
    capture_(fused[:, 2:4], fused[:, 4:6], pool_key, pool_value, rows, slots, rows, None, True)
    assert torch.equal(pool_key[5:23], fused[2:20, 2:4]) and torch.equal(pool_value[5:23], fused[2:20, 4:6])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": zeros(4, 2, 8)}, r"value \(4, 2, 8\) torch.float32: expected \[..., 2, 16\]"),
        ({"pool_key": zeros(4, 2, 16).half()}, "pool_key .* torch.float16: expected"),
        ({"pool_value": zeros(4, 4, 16)[:, :2]}, "expected contiguous tensors"),
        ({"slots": torch.arange(2)}, "1 rows, 2 slots, 1 positions"),
        ({"table": zeros(8, 18)}, "rotary dimension 18"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, torch.Tensor], says: str) -> None:
    index = torch.arange(1)
    given: dict[str, Any] = {"slots": index, "rows": index, "positions": index, "table": None, "neox": True}
    given |= {name: zeros(4, 2, 16) for name in ("key", "value")}
    given |= {name: zeros(5, 2, 16) for name in ("pool_key", "pool_value")}
    with pytest.raises(ValueError, match=says):
        capture_(**{**given, **change})
