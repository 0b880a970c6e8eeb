"""Span attention, rotation, merging and log-sum-exps against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.span_attention.reference import (
    merge_reference,
    rotate_reference,
    span_attention_reference,
)
from vllm_hypic.backends.ops.span_attention.torch_ops import causal_lse, merge, rotate, span_attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an output relative to the largest value, about four roundings of the dtype: K is
rounded once after its rotation, probabilities once before they weigh V, the result once."""
LSE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Absolute: scores have a standard deviation of one and an error of the rounding of K."""
DTYPES = list(TOLERANCE)


class Case:
    """Random inputs; pool rows that are no column of the request hold NaN."""

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 64,
        rotary: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(dtype)

        pool = 2 * columns + 5
        self.query = normal(rows, heads, size)
        self.slots = torch.randperm(pool, generator=rng)[:columns]
        self.key, self.value = (torch.full((pool, kv_heads, size), float("nan"), dtype=dtype) for _ in "kv")
        self.key[self.slots], self.value[self.slots] = (
            normal(columns, kv_heads, size),
            normal(columns, kv_heads, size),
        )
        self.rotation = None
        if rotary is None:
            rotary = size
        if rotary:
            positions = torch.randint(0, 5000, (columns, 1), generator=rng)
            angles = positions / 10000 ** (torch.arange(0, rotary, 2) / rotary)
            self.rotation = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        self.visible = torch.randint(0, columns + 1, (rows,), generator=rng)
        self.visible[0], self.visible[-1] = 0, columns
        self.scale = size**-0.5

    def check(self, neox: bool = True, visible: torch.Tensor | None = None) -> None:
        visible = self.visible if visible is None else visible
        args = (self.query, self.key, self.value, self.slots, self.rotation, neox, visible, self.scale)
        out, lse = span_attention(*args)
        wanted_out, wanted_lse = span_attention_reference(*args)
        dtype = self.query.dtype
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert out.shape == self.query.shape and lse.shape == self.query.shape[:2]
        error = float((out.double() - wanted_out).abs().max()) / float(self.value[self.slots].abs().max())
        assert error <= TOLERANCE[dtype], error
        blind = visible == 0
        assert (lse[blind] == float("-inf")).all() and (out[blind] == 0).all()
        seen = ~blind
        if seen.any():
            assert float((lse[seen].double() - wanted_lse[seen]).abs().max()) <= LSE_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 63, 500])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_and_columns(rows: int, columns: int, dtype: torch.dtype) -> None:
    Case(rows, columns, dtype=dtype, seed=rows + columns).check()


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_heads(group: int, size: int) -> None:
    for dtype in DTYPES:
        Case(7, 63, heads=2 * group, kv_heads=2, size=size, dtype=dtype, seed=group).check()


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [0, 16, 48, 64])
def test_rotations(rotary: int, neox: bool) -> None:
    for dtype in DTYPES:
        Case(7, 63, rotary=rotary, dtype=dtype, seed=rotary).check(neox)


@pytest.mark.parametrize("seen", [0, 1, 62, 63])
def test_all_rows_see_the_same(seen: int) -> None:
    Case(7, 63).check(visible=torch.full((7,), seen))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_rotation_keeps_its_input(neox: bool) -> None:
    """K in the pool is read by every request: rotating it in place would destroy it."""
    case = Case(1, 20, rotary=16)
    raw = case.key[case.slots]
    before = raw.clone()
    ours = rotate(raw, case.rotation, neox)
    assert torch.equal(raw, before)
    torch.testing.assert_close(
        ours.double(), rotate_reference(raw, case.rotation, neox), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(ours[..., 16:], before[..., 16:]), "elements outside the rotary dimension moved"


def part(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 8, generator=rng), 10 * torch.randn(rows, 2, generator=rng)


SEEDS = st.integers(0, 2**20)


@given(SEEDS, SEEDS)
def test_merge_is_symmetric_and_right(a: int, b: int) -> None:
    out_a, lse_a = part(5, a)
    out_b, lse_b = part(5, b)
    ours = merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(ours, merge(out_b, lse_b, out_a, lse_a))
    torch.testing.assert_close(
        ours.double(), merge_reference(out_a, lse_a, out_b, lse_b), rtol=1e-5, atol=1e-6
    )


@given(SEEDS)
def test_merging_with_nothing_changes_nothing(seed: int) -> None:
    out, lse = part(5, seed)
    nothing = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    assert torch.equal(merge(out, lse, *nothing), out)
    assert torch.equal(merge(*nothing, out, lse), out)


@given(SEEDS)
def test_merge_is_associative(seed: int) -> None:
    (a, la), (b, lb), (c, lc) = (part(5, seed + i) for i in range(3))
    left = merge(merge(a, la, b, lb), torch.logaddexp(la, lb), c, lc)
    right = merge(a, la, merge(b, lb, c, lc), torch.logaddexp(lb, lc))
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), SEEDS)
def test_columns_split_anywhere(first: int, second: int, seed: int) -> None:
    """Two spans merged are the span over both, for rows that end anywhere."""
    case = Case(5, first + second, seed=seed)
    assert case.rotation is not None

    def span(columns: slice, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert case.rotation is not None
        slots, rotation = case.slots[columns], case.rotation[columns]
        return span_attention(case.query, case.key, case.value, slots, rotation, True, visible, case.scale)

    whole, lse = span(slice(None), case.visible)
    head = span(slice(first), case.visible.clamp(max=first))
    tail = span(slice(first, None), (case.visible - first).clamp(min=0))
    seen = case.visible > 0
    torch.testing.assert_close(merge(*head, *tail)[seen], whole[seen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.logaddexp(head[1], tail[1]), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 500), (7, 7), (7, 63), (64, 500)])
@pytest.mark.parametrize("group", [1, 4])
def test_causal_lse(rows: int, keys: int, group: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(rows + keys)
    query = torch.randn(rows, 2 * group, 64, generator=rng).to(dtype)
    key = torch.randn(keys, 2, 64, generator=rng).to(dtype)
    scores = torch.einsum("qhd,khd->qhk", query.double(), key.double().repeat_interleave(group, 1)) / 8
    ahead = torch.arange(keys) > torch.arange(keys - rows, keys)[:, None]
    wanted = scores.masked_fill(ahead[:, None], float("-inf")).logsumexp(-1)
    ours = causal_lse(query, key, 1 / 8)
    assert float((ours.double() - wanted).abs().max()) <= LSE_TOLERANCE[dtype]
