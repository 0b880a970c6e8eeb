"""Scores with a soft-cap, in the pool and in vLLM's cache, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import native, reference
from vllm_hypic.backends.ops.span_attention import torch as torch_ops

from .cached import Cached
from .test_span_attention import DTYPES, KERNELS, Case
from .test_windows import close

CAPS = pytest.mark.parametrize("cap", [0.5, 50.0])
"""One that bends every score, and Gemma 2's."""


@KERNELS
@CAPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 63, 4_600])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("window", [None, 20])
def test_public_columns(
    window: int | None, rows: int, columns: int, dtype: torch.dtype, cap: float, kernels: ModuleType
) -> None:
    case = Case((rows, columns), (rows, 70), dtype=dtype, seed=rows)
    hidden = None if window is None else (case.visible_kv_lens - window).clamp(min=0)

    def run(ops: ModuleType, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.span_attention(
            *(case.query, case.key, case.value, case.slots, case.positions, case.table, case.neox),
            *(case.visible_kv_lens, case.query_ranges, case.scale, hidden, cap),
        )

    close(run(kernels, cap), wanted := run(reference, cap), dtype)
    if cap < 1 and rows > 1:
        free = run(kernels, 0.0)[1]
        seen = ~free.isinf()
        assert float((free - wanted[1])[seen].abs().max()) > 0.1


def test_scores_in_pieces_are_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's version holds so many scores at a time: rows in pieces of one, of three, all."""
    found = []
    for most in (1, 3 * 2 * 70, 1 << 22):
        monkeypatch.setattr(torch_ops, "_CAPPED_SCORES", most)
        case = Case((7, 70))
        found.append(
            torch_ops.span_attention(
                *(case.query, case.key, case.value, case.slots, case.positions, case.table, case.neox),
                *(case.visible_kv_lens, case.query_ranges, case.scale, None, 0.5),
            )
        )
    for out, lse in found[:2]:
        torch.testing.assert_close((out, lse), found[2], rtol=1e-5, atol=1e-6)


@CAPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cached_tokens(dtype: torch.dtype, cap: float) -> None:
    case = Cached((1, 1), (1, 600), (7, 7), (5, 33), (60, 900), dtype=dtype)
    found, wanted = (ops.cache_attention(*case.attention_arguments, cap) for ops in (torch_ops, reference))
    close(found, wanted, dtype)
    close((found[0], torch_ops.cache_lse(*case.lse_arguments, cap)), wanted, dtype)


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
    error = ((one_score(scores, cap, kernels) - wanted) / wanted).abs().max()
    assert float(error) < 4e-7


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_no_number_is_not_passed_over(rows: int, dtype: torch.dtype, kernels: ModuleType) -> None:
    case = Case((rows, 300), dtype=dtype)
    case.key[case.slots[0][270]] = float("nan")
    out, lse = kernels.span_attention(
        *(case.query, case.key, case.value, case.slots, case.positions, case.table, case.neox),
        *(torch.full_like(case.visible_kv_lens, 300), case.query_ranges, case.scale, None, 5.0),
    )
    assert out.isnan().all() and lse.isnan().all()


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="soft_cap -1"):
        one_score(torch.ones(1), -1.0, native)
