"""Records in FP8 in Triton, against float64; ``test_windows.py`` has vLLM's cache."""

import copy
from typing import Any

import pytest
import torch
from backends.cases import cos_sin_table
from span_cases import FP8, LARGEST, SCALES, Case, on, over, skip_without_fp8

from vllm_hypic.backends.ops.span_attention.eager import unrotate
from vllm_hypic.backends.ops.span_attention.reference import unrotate_reference
from vllm_hypic.backends.ops.span_attention.triton import operators

pytestmark = pytest.mark.usefixtures("short_parts")


@pytest.fixture(autouse=True)
def _fp8(device: torch.device) -> None:
    skip_without_fp8(device)


@pytest.mark.parametrize("windowed", [False, True], ids=["", "window"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "rotary", "neox"),
    [(64, 64, True), (64, 64, False), (72, 48, True), (96, 0, True), (128, 2, False), (256, 64, True)],
)
def test_columns(
    size: int, rotary: int, neox: bool, dtype: torch.dtype, windowed: bool, device: torch.device
) -> None:
    shape: Any = {"heads": 6, "size": size, "rotary": rotary, "neox": neox, "seed": size}
    case = Case((2, 300), (25, 130), (1, 70), (3, 0), **shape, dtype=dtype, device=device)
    if windowed:
        case.hidden_kv_lens = (case.visible_kv_lens - 50).clamp(min=0)
    kept = copy.copy(case)
    kept.key, kept.value = over(case.key, SCALES["key_scale"]), over(case.value, SCALES["value_scale"])
    case.key = (kept.key.double() * SCALES["key_scale"]).float()
    case.value = (kept.value.double() * SCALES["value_scale"]).float()
    (out, lse), wanted = kept.run(**SCALES), case.wanted()
    case.compare(out, lse, wanted)
    with pytest.raises(AssertionError):
        case.compare(1.1 * out, lse, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (64, 0), (72, 48), (256, 64)])
def test_captured_rows(size: int, rotary: int, neox: bool, dtype: torch.dtype, device: torch.device) -> None:
    """To the nearest number of FP8, but for another rounding of the rotation; some are too large for it."""
    rng = torch.Generator().manual_seed(size + rotary)
    count = 37
    given = (torch.randn(2, count, 2, size, generator=rng) * 4).to(dtype)
    pool = [torch.full((90, 2, size), float("nan")).to(FP8).to(device) for _ in "kv"]
    slots = torch.randperm(90, generator=rng)[:count]
    positions = torch.randint(0, 1000, (count,), generator=rng)
    table = 1.3 * cos_sin_table(rotary, torch.float32) if rotary else None
    on_device = on(device, [torch.arange(count), slots, positions, table])
    operators.capture_(*given.to(device), *pool, *on_device, neox, *SCALES.values())

    kept = [x.float().cpu()[slots] for x in pool]
    assert torch.equal(kept[1], over(given[1], SCALES["value_scale"]).float())
    assert (kept[0].abs() == LARGEST).any()
    wanted = (unrotate_reference(given[0], table, positions, neox) / 0.02).clamp(-LARGEST, LARGEST)
    step = (kept[0].abs() * 2**-4).clamp(min=2**-10)
    near = (kept[0] - wanted).abs() <= step + 2**-8 * wanted.abs().amax(-1, keepdim=True)
    assert near.all()
    same = kept[0] == over(unrotate(given[0], table, positions, neox), 0.02).float()
    assert float(same.float().mean()) > 0.98
    others = torch.ones(90, dtype=torch.bool).index_fill_(0, slots, False)
    assert all(x.float().cpu()[others].isnan().all() for x in pool)


def test_pools_of_unlike_types_are_refused(device: torch.device) -> None:
    case = Case((1, 70), dtype=torch.bfloat16, device=device)
    case.key = case.key.to(FP8)
    with pytest.raises(ValueError, match="expected one dtype, or pools in FP8"):
        case.run()
