"""Public columns in FP8, and scores with a soft-cap in the pool and in vLLM's cache, against float64."""

from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import Layout, eager, native, reference
from vllm_hypic.pool.geometry import FP8
from vllm_hypic.pool.tensors import PublicKV, quantised

from .cases import DTYPES, LAYOUTS, Case
from .test_join import REQUESTS, Joined
from .test_span_attention import BOTH_KERNELS, KERNELS, SCALES, Quantised
from .test_windows import close


@KERNELS
@pytest.mark.parametrize("size", [16, 64, 80, 192])
@pytest.mark.parametrize(("rows", "kv_heads", "heads"), [(1, 6, 18), (4, 2, 4), (20, 3, 6)])
def test_heads(rows: int, kv_heads: int, heads: int, size: int, kernels: ModuleType) -> None:
    for dtype in DTYPES:
        case = Quantised((rows, 513), (2, 1), heads=heads, kv_heads=kv_heads, size=size, dtype=dtype)
        case.check(kernels)


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
@BOTH_KERNELS
@LAYOUTS
def test_join(layout: Layout, block: int, size: int, versions: Any, dtype: torch.dtype) -> None:
    for window in (None, 20):
        case = Joined(*REQUESTS, window=window, layout=layout, block=block, size=size, dtype=dtype)
        key, value = (quantised(t, by) for t, by in zip(case.pool[:2], SCALES, strict=True))
        case.pool = case.pool._replace(key=key, value=value, key_scale=SCALES[0], value_scale=SCALES[1])
        case.check(*versions)


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


CAPS = pytest.mark.parametrize("cap", [0.5, 50.0])
"""One that bends every score, and Gemma 2's."""


@BOTH_KERNELS
@CAPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 63, 4_600])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("window", [None, 20])
def test_public_columns(
    window: int | None, rows: int, columns: int, dtype: torch.dtype, cap: float, versions: Any
) -> None:
    case = Case((rows, columns), (rows, 70), dtype=dtype, seed=rows)
    hidden = None if window is None else (case.visible_kv_lens - window).clamp(min=0)
    wanted = case.run(reference, hidden, cap)
    for kernels in versions:
        close(case.run(kernels, hidden, cap), wanted, dtype)
        if cap < 1 and rows > 1:
            free = case.run(kernels, hidden)[1]
            assert float((free - wanted[1])[~free.isinf()].abs().max()) > 0.1


def test_scores_in_pieces_are_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's version bounds the scores in memory: it takes rows one by one, three by three, or all."""
    found = []
    for most in (1, 3 * 2 * 70, 1 << 22):
        monkeypatch.setattr(eager, "_CAPPED_SCORES", most)
        found.append(Case((7, 70)).run(eager, None, 0.5))
    for out, lse in found[:2]:
        torch.testing.assert_close((out, lse), found[2], rtol=1e-5, atol=1e-6)


def one_score(scores: torch.Tensor, cap: float, kernels: ModuleType) -> torch.Tensor:
    """Log-sum-exp of rows that see a single column, with ``scores [rows]`` float32: the score itself."""
    rows = len(scores)
    query, key = torch.zeros(rows, 1, 16), torch.zeros(1, 1, 16)
    query[:, 0, 0], key[..., 0] = scores, 1
    column = [torch.zeros(1, dtype=torch.int64)]
    ends, ranges = torch.ones(rows, dtype=torch.int64), torch.tensor([[0, rows]])
    return kernels.span_attention(
        query, key, key, column, column, None, True, ends, ranges, 1.0, soft_cap=cap
    )[1][:, 0]


@KERNELS
@CAPS
def test_a_score_is_right_to_rounding(cap: float, kernels: ModuleType) -> None:
    scores = torch.logspace(-12, 4, 20_000)
    scores = torch.cat([scores, -scores])
    wanted = cap * torch.tanh(scores.double() / cap)
    assert float(((one_score(scores, cap, kernels) - wanted) / wanted).abs().max()) < 4e-7


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="soft_cap -1"):
        one_score(torch.ones(1), -1.0, native)
