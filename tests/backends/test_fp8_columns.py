"""Public columns in FP8: span attention over them against float64, and what becomes FP8."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import Layout, reference
from vllm_hypic.pool.geometry import FP8
from vllm_hypic.pool.tensors import PublicKV, quantised

from .cached import LAYOUTS
from .test_join import REQUESTS, Joined
from .test_span_attention import DTYPES, KERNELS, Case

SCALES = 0.75, 2.5
"""Of K and V; no powers of two, so that what is read in bfloat16 is rounded once more."""
ONE_MORE_ROUNDING = 1.5


class Quantised(Case):
    """K and V as FP8 times :data:`SCALES`, of the query's dtype no more."""

    def run(self, kernels: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (quantised(t, by) for t, by in zip((self.key, self.value), SCALES, strict=True))
        return kernels.span_attention(
            self.query,
            key,
            value,
            self.slots,
            self.positions,
            self.table,
            self.neox,
            self.visible_kv_lens,
            self.query_ranges,
            self.scale,
            None,
            0.0,
            *SCALES,
        )


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 63, 500])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_and_columns(rows: int, columns: int, dtype: torch.dtype, kernels: ModuleType) -> None:
    Quantised((rows, columns), dtype=dtype, seed=rows + columns).check(kernels, ONE_MORE_ROUNDING)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 300])
def test_several_parts(rows: int, dtype: torch.dtype, kernels: ModuleType) -> None:
    case = Quantised((rows, 8_500), size=32, heads=8, dtype=dtype, rotary=16)
    case.check(kernels, ONE_MORE_ROUNDING)


@KERNELS
@pytest.mark.parametrize("size", [16, 64, 80, 192])
@pytest.mark.parametrize(("rows", "kv_heads", "group"), [(1, 6, 3), (4, 2, 2), (20, 3, 2)])
def test_heads(rows: int, kv_heads: int, group: int, size: int, kernels: ModuleType) -> None:
    for dtype in DTYPES:
        case = Quantised(
            (rows, 513), (2, 1), heads=kv_heads * group, kv_heads=kv_heads, size=size, dtype=dtype
        )
        case.check(kernels, ONE_MORE_ROUNDING)


@KERNELS
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [0, 64, 128])
def test_rotations_of_few_rows(rotary: int, neox: bool, kernels: ModuleType) -> None:
    for table in (torch.bfloat16, torch.float32):
        Quantised(
            (1, 700), (2, 63), size=128, rotary=rotary, neox=neox, dtype=torch.bfloat16, table_dtype=table
        ).check(kernels, ONE_MORE_ROUNDING)


@KERNELS
def test_scales_count(kernels: ModuleType) -> None:
    """Each apart: what the tolerance lets pass is no scale that is left out."""
    case = Quantised((5, 300))
    out, lse = case.run(kernels)
    for key_scale, value_scale in ((1.0, SCALES[1]), (SCALES[0], 1.0)):
        plain = Case((5, 300))
        plain.key = quantised(case.key, SCALES[0]).float() * key_scale
        plain.value = quantised(case.value, SCALES[1]).float() * value_scale
        other, other_lse = plain.run(reference)
        seen = case.visible_kv_lens > 0
        assert (out - other).abs().max() > 0.05 or (lse - other_lse)[seen].abs().max() > 0.05


@KERNELS
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("what", ["key", "value"])
def test_what_is_no_number_is_not_passed_over(what: str, rows: int, kernels: ModuleType) -> None:
    for dtype in DTYPES:
        case = Quantised((rows, 300), dtype=dtype)
        getattr(case, what)[case.slots[0][270]] = float("nan")
        case.visible_kv_lens[:] = 300
        out, _ = case.run(kernels)
        assert out.isnan().all()


@KERNELS
def test_every_number(kernels: ModuleType) -> None:
    """All 254 numbers of FP8, the smallest among them, as V of a column that is alone."""
    bits = torch.arange(256).to(torch.uint8)
    numbers = torch.cat([bits[:0x7F], bits[0x80:0xFF], torch.zeros(2, dtype=torch.uint8)]).view(FP8)
    for dtype in DTYPES:
        case = Case((1, 1), heads=1, kv_heads=1, size=256, dtype=dtype)
        case.visible_kv_lens[:] = 1
        case.key = torch.zeros(case.key.shape, dtype=FP8)
        case.value = numbers.view(1, 1, 256).repeat(len(case.key), 1, 1)
        out, _ = case.run(kernels)
        assert torch.equal(out[0, 0], numbers.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KERNELS
@LAYOUTS
def test_join(layout: Layout, block: int, size: int, kernels: ModuleType, dtype: torch.dtype) -> None:
    for window in (None, 20):
        case = Joined(*REQUESTS, window=window, layout=layout, block=block, size=size, dtype=dtype)
        key, value = (quantised(t, by) for t, by in zip(case.pool[:2], SCALES, strict=True))
        case.pool = case.pool._replace(key=key, value=value, key_scale=SCALES[0], value_scale=SCALES[1])
        case.check(kernels)


def test_rows_are_rounded_to_the_nearest_and_none_overflows() -> None:
    rows = torch.tensor([[[0.0, 1.0, 1.07, -1.07, 447.0, 470.0, -1e6, 2.0**-10, float("nan")]]])
    found = quantised(rows, 1.0).float()[0, 0].tolist()
    assert found[:8] == [0.0, 1.0, 1.125, -1.125, 448.0, 448.0, -448.0, 0.0] and found[8] != found[8]
    assert quantised(rows * 4, 4.0).float()[0, 0].tolist()[:8] == found[:8]


def test_records_are_written_by_their_scales() -> None:
    rows = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.tensor([4, 0, 2])
    public = PublicKV(*(torch.zeros(6, 2, 16, dtype=FP8) for _ in "kv"), *SCALES)
    public.write(slots, rows, 3 * rows)
    for kept, scale, wanted in ((public.key, SCALES[0], rows), (public.value, SCALES[1], 3 * rows)):
        # Half of a last place of three bits, or half of the smallest number.
        error = (kept.float()[slots] * scale - wanted).abs()
        assert (error <= torch.maximum(wanted.abs() / 16, torch.tensor(scale * 2.0**-10))).all()
        assert not kept.float()[[1, 3, 5]].any()
