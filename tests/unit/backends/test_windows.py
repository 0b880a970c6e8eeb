"""Rows that see a range of columns, in the pool and in vLLM's cache, against float64."""

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.backends.ops.span_attention import eager, reference
from vllm_hypic.pool.plans import ComposePoint, StreamPlan
from vllm_hypic.pool.step import AttentionRows, BatchRow, StreamTensors, composed_row

from .cases import DTYPES, LSE_TOLERANCE, TOLERANCE, Attended, Cached, Case
from .test_span_attention import KERNELS


def close(ours: Attended, wanted: Attended, dtype: torch.dtype) -> None:
    (out, lse), (wanted_out, wanted_lse) = ours, wanted
    assert out.dtype == lse.dtype == torch.float32
    assert float((out.double() - wanted_out).abs().max()) <= 4 * TOLERANCE[dtype]
    blind = wanted_lse.isinf()
    assert torch.equal(lse.isinf(), blind) and (out[blind] == 0).all()
    assert not (~blind).any() or float((lse - wanted_lse)[~blind].abs().max()) <= LSE_TOLERANCE[dtype]


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("window", [1, 20, 255, 256, 3000])
def test_public_columns(window: int, rows: int, dtype: torch.dtype, kernels: ModuleType) -> None:
    """Rows whose windows begin anywhere, behind what they see, too: those see nothing."""
    case = Case((rows, 4_600), (rows, 70), dtype=dtype, seed=window)
    rng = torch.Generator().manual_seed(rows)
    behind = torch.randint(0, 40, case.visible_kv_lens.shape, generator=rng)
    hidden = (case.visible_kv_lens - window + behind).clamp(min=0)
    hidden[-1] = case.visible_kv_lens[-1]
    close(case.run(kernels, hidden), wanted := case.run(reference, hidden), dtype)
    assert wanted[1][-1].isinf().all()


@KERNELS
def test_hiding_nothing_changes_nothing(kernels: ModuleType) -> None:
    case = Case((5, 700), (1, 90), dtype=torch.bfloat16)
    plain, same = case.run(kernels), case.run(kernels, torch.zeros_like(case.visible_kv_lens))
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "cap"), [*((window, 0.0) for window in (1, 20, 255, 256, 3000)), (None, 0.5), (None, 50.0)]
)
def test_cached_tokens(window: int | None, cap: float, dtype: torch.dtype) -> None:
    case = Cached((1, 1), (1, 600), (7, 7), (5, 33), (60, 900), dtype=dtype, window=window)
    found, wanted = (ops.cache_attention(*case.attention_arguments, cap) for ops in (eager, reference))
    close(found, wanted, dtype)
    if window is None:
        close((found[0], eager.cache_lse(*case.lse_arguments, cap)), wanted, dtype)


def test_what_a_plan_hides() -> None:
    """By logical distance, generated tokens among them: each row sees itself and the window - 1 before it."""
    positions = np.array([0, 1, 2, 3, 4, 15, 16, 17, 26, 27])
    columns = np.array([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18, 19, 20, 21, 22, 23, 24, 25])
    points = (ComposePoint(5, 0, 10, replace_state=False), ComposePoint(8, 1, 8, replace_state=False))
    plan = StreamPlan(positions, 28, points, columns, columns, use_transition=True)
    logical = plan.logical(0, 16)
    for window in (1, 2, 5, 11, 12, 40):
        public, tokens = plan.hidden(3, 16, window)
        for row, at in enumerate(logical[3:]):
            assert public[row] == sum(c <= at - window for c in columns)
            assert tokens[row] == sum(p <= at - window for p in logical)
    assert not plan.apart(5) and plan.apart(6) and plan.apart(16)
    assert not StreamPlan.alone(np.arange(4)).apart(4) and StreamPlan.alone(np.array([0, 1, 3])).apart(3)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 20), st.integers(1, 60), st.data())
def test_rows_that_are_not_far_lose_nothing_in_the_stream(
    prompt: list[bool], generated: int, window: int, data: st.DataObject
) -> None:
    """So stock attention with its own window is right for them, and so is a log-sum-exp without one."""
    public = np.array([*prompt, False])
    positions, columns = np.flatnonzero(~public), np.flatnonzero(public)
    points = (ComposePoint(data.draw(st.integers(0, len(positions) - 1)), 0, len(columns), False),)
    plan = StreamPlan(positions, len(public), points, columns, columns, use_transition=True)
    s1 = data.draw(st.integers(1, len(positions) + generated))
    s0 = data.draw(st.integers(0, s1 - 1))
    stream = StreamTensors.of(plan, torch.device("cpu"))
    composed = [composed_row(BatchRow(0, 0, s1 - s0, s0, s1), stream)]
    rows = AttentionRows.of(composed, window, 0, s1 - s0)
    assert rows.replaced is not None or s1 <= window
    assert rows.all_replaced == (rows.replaced is not None)
    assert not AttentionRows.of(composed, window, 0, s1 - s0 + 1).all_replaced, "a row of others is left out"


@pytest.mark.parametrize("window", [None, 1000])
def test_short_requests_that_generate_are_replaced(window: int | None) -> None:
    """Nothing is hidden from them; a prefill, a long request and one that reads nothing are left to stock."""
    columns = np.arange(4, 34)
    points = (ComposePoint(4, 0, 30, replace_state=False),)
    plan = StreamPlan(np.array([0, 1, 2, 3, 34, 35]), 36, points, columns, columns, use_transition=True)
    stream = StreamTensors.of(plan, torch.device("cpu"))
    for (s0, s1), replaced in {(8, 9): True, (9, 10): False, (0, 6): False, (3, 4): False}.items():
        row = composed_row(BatchRow(0, 0, s1 - s0, s0, s1), stream)
        rows = AttentionRows.of([row], window, 9, s1 - s0)
        assert (rows.replaced is not None) == rows.all_replaced == replaced
        assert (rows.merged is not None) == (not replaced and row.max_visible_kv_len > 0)
        if rows.replaced is not None:
            assert rows.replaced.public.visible_kv_lens.tolist() == [30]
            hidden = rows.replaced.hidden_columns, rows.replaced.hidden_tokens
            assert all(h is None if window is None else h is not None and not h.any() for h in hidden)
