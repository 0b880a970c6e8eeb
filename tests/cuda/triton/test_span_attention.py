"""Span attention in Triton against float64."""

from typing import Any

import pytest
import torch
from backends.cases import DTYPES
from span_cases import Case

from vllm_hypic.backends.ops.span_attention import choose, plan, refuses
from vllm_hypic.backends.ops.span_attention.plan import SpanColumns, SpanPlan
from vllm_hypic.backends.ops.span_attention.triton import operators

ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@ALL_DTYPES
@pytest.mark.parametrize("size", [16, 32, 64, 72, 96, 128, 256])
def test_head_sizes(size: int, dtype: torch.dtype, device: torch.device) -> None:
    Case((2, 70), (9, 70), size=size, dtype=dtype, device=device, seed=size).check()


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [0, 2, 16, 48, 64])
def test_rotations(rotary: int, neox: bool, device: torch.device) -> None:
    given: Any = {"rotary": rotary, "neox": neox, "device": device, "seed": rotary}
    Case((9, 70), **given).check()
    for dtype in (torch.float16, torch.bfloat16):
        for table in (dtype, torch.float32):
            Case((9, 70), dtype=dtype, table_dtype=table, **given).check()


@pytest.mark.parametrize(("size", "rotary"), [(72, 64), (72, 0), (96, 0), (112, 16), (160, 32)])
def test_dimensions_that_are_not_rotated(size: int, rotary: int, device: torch.device) -> None:
    """Tiles of them that are padded, and two tiles."""
    for neox in (True, False):
        Case((9, 70), size=size, rotary=rotary, neox=neox, device=device, seed=size).check()


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@ALL_DTYPES
def test_a_quarter_of_a_large_head_is_rotated(dtype: torch.dtype, neox: bool, device: torch.device) -> None:
    shape: Any = {"heads": 8, "kv_heads": 1, "size": 256, "rotary": 64, "neox": neox}
    Case((1, 40), (5, 70), **shape, dtype=dtype, device=device).check()


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_groups(group: int, device: torch.device) -> None:
    """Of few rows and of many, so that rows lie across the ends of tiles where the group is odd."""
    for dtype in (torch.float32, torch.bfloat16):
        given: Any = {"heads": 2 * group, "size": 32, "dtype": dtype, "device": device, "seed": group}
        Case((1, 63), (2, 5), (45, 63), **given).check()


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 4, 7, 33])
def test_rows_and_columns(rows: int, columns: int, device: torch.device) -> None:
    Case((rows, columns), size=32, device=device, seed=rows + columns).check()


@ALL_DTYPES
def test_requests(dtype: torch.dtype, device: torch.device) -> None:
    """Uneven ones, one without columns, one that sees none of its columns."""
    case = Case((1, 300), (5, 1), (3, 0), (40, 130), (1, 0), (2, 9), (1, 65), dtype=dtype, device=device)
    case.visible_kv_lens[-3:-1] = 0
    case.check()


def test_no_rows(device: torch.device) -> None:
    """Requests of which nothing is computed, and columns that nobody has."""
    case = Case((1, 70), (1, 0), device=device)
    case.query_ranges[:, 1] = case.query_ranges[:, 0]
    case.visible_kv_lens = case.visible_kv_lens[:0]
    out, lse = case.run()
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    out, lse = Case((2, 0), device=device).run()
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("seen", [0, 1, 63, 64, 70])
def test_all_rows_see_the_same(seen: int, device: torch.device) -> None:
    case = Case((9, 70), device=device)
    case.visible_kv_lens[:] = seen
    case.check()


@pytest.mark.usefixtures("short_parts")
@ALL_DTYPES
def test_parts_are_merged(dtype: torch.dtype, device: torch.device) -> None:
    """Tiles of one part and of several in one launch; rows that see nothing of the later parts."""
    requests = (1, 300), (2, 64), (1, 65), (25, 300), (30, 128), (4, 0)
    Case(*requests, heads=6, size=32, dtype=dtype, device=device).check()


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("rows", [1, 20])
def test_parts_of_a_padded_head_are_merged(rows: int, device: torch.device) -> None:
    Case((rows, 200), size=72, device=device).check()


@pytest.mark.usefixtures("short_parts")
def test_more_parts_than_are_read_at_a_time(device: torch.device) -> None:
    """The largest scores come last, so that all that was merged before must shrink."""
    columns = 64 * 17 + 1
    case = Case((2, columns), heads=2, kv_heads=1, size=16, device=device)
    case.visible_kv_lens[0] = 64 * 16 + 3
    case.key[case.slots[0][64 * 16 :]] *= 8
    case.check(larger=8)


def test_parts_as_long_as_they_are(device: torch.device) -> None:
    """The lengths that a model gets: one more column than fits into parts."""
    Case((1, 513), (9, 1025), heads=2, kv_heads=1, size=16, device=device).check()


@pytest.mark.usefixtures("short_parts")
def test_larger_tiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Tiles as newer GPUs have them."""
    monkeypatch.setattr(plan, "many_rows", lambda *given: 128)
    Case((45, 150), (1, 70), heads=6, size=32, device=device).check()


@pytest.mark.usefixtures("short_parts")
def test_a_request_does_not_feel_its_neighbours(device: torch.device) -> None:
    """Bit for bit, whether it is decoded or prefilled."""
    case = Case((1, 200), (20, 150), (2, 300), (30, 70), dtype=torch.bfloat16, device=device)
    out, lse = case.run()
    query_ranges, visible_kv_lens = case.query_ranges, case.visible_kv_lens
    slots, positions = case.slots, case.positions
    done = 0
    for i, (first, last) in enumerate(query_ranges.tolist()):
        rows = slice(done, done + last - first)
        done += last - first
        case.query_ranges, case.visible_kv_lens = query_ranges[i : i + 1], visible_kv_lens[rows]
        case.slots, case.positions = slots[i : i + 1], positions[i : i + 1]
        alone, alone_lse = case.run()
        assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows])


def test_unlike_scores(device: torch.device) -> None:
    """The largest score comes first, last, or is so large that the others vanish."""
    for factor in (1.0, 30.0, -30.0):
        case = Case((5, 200), size=32, device=device)
        case.key[case.slots[0]] *= torch.linspace(0, factor, 200, device=device)[:, None, None]
        case.check(larger=abs(factor))


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # the interpreter's maximum
@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("what", ["key", "value"])
def test_what_is_no_number_is_not_passed_over(what: str, rows: int, device: torch.device) -> None:
    case = Case((rows, 200), dtype=torch.bfloat16, device=device)
    getattr(case, what)[case.slots[0][170]] = float("nan")
    case.visible_kv_lens[:] = 200
    out, lse = case.run()
    assert out.isnan().all()
    assert lse.isnan().all() == (what == "key") and lse.isnan().any() == (what == "key")


@pytest.mark.usefixtures("short_parts")
def test_one_plan_serves_all_layers(device: torch.device) -> None:
    """Layers of unlike pools, strides and rotations; a query that is part of a larger tensor."""
    sizes = [(1, 200), (30, 70)]
    cases = [Case(*sizes, device=device), Case(*sizes, rotary=32, neox=False, device=device)]
    columns = SpanColumns.of(cases[0].slots, cases[0].positions)
    query_ranges, visible_kv_lens = cases[0].query_ranges.numpy(), cases[0].visible_kv_lens.numpy()
    shared = SpanPlan.of(columns, query_ranges, visible_kv_lens, 4, 2, 64, torch.float32)
    for case in cases:
        wide = torch.full((len(case.query), 8, 64), float("nan"), device=device)
        wide[:, 2:6] = case.query
        both = torch.stack([case.key, case.value], 1)
        out, lse = operators.attend(
            wide[:, 2:6], both[:, 0], both[:, 1], case.table, case.neox, shared, case.scale
        )
        case.compare(out.cpu(), lse.cpu(), case.wanted())


@pytest.mark.usefixtures("short_parts")
def test_warming_up_runs(device: torch.device) -> None:
    operators.warm_up(4, 2, 16, torch.bfloat16, torch.ones(2, 16, device=device), True, device)
    cache = torch.zeros(2, 16, 2, 16, dtype=torch.bfloat16, device=device)
    operators.warm_up(2, 2, 16, torch.bfloat16, None, True, device, (cache, cache))


def test_a_plan_for_another_dtype_is_refused(device: torch.device) -> None:
    case = Case((1, 70), device=device)
    columns = SpanColumns.of(case.slots, case.positions)
    other = SpanPlan.of(columns, case.query_ranges.numpy(), case.visible_kv_lens.numpy(), 4, 2, 64)
    with pytest.raises(ValueError, match=r"a plan for 2 bytes .* dtype=torch.float32"):
        operators.attend(case.query, case.key, case.value, case.table, case.neox, other, case.scale)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"visible_kv_lens": torch.tensor([71])}, "row 0 sees 71 of 70 columns"),
        ({"visible_kv_lens": torch.tensor([-1])}, "row 0 sees -1 of 70 columns"),
        ({"visible_kv_lens": torch.tensor([1, 2])}, "visible_kv_lens: 2 numbers for 1 rows"),
        ({"query_ranges": torch.tensor([[3, 2]])}, "request 0 has -1 rows"),
        ({"query_ranges": torch.tensor([[3, 4], [4, 5]])}, "query_ranges of 2 requests, columns of 1"),
        ({"slots": []}, r"\(\) slots, but \(70,\) positions"),
        ({"key": torch.zeros(7, 2, 32)}, r"pool_key \(7, 2, 32\): expected \[slots, 2, 64\]"),
        ({"value": torch.zeros(7, 2, 64).half()}, "pool_value torch.float16, query torch.float32"),
        ({"query": torch.zeros(6, 3, 64)}, "3 query heads: expected a multiple of the 2 KV heads"),
        ({"table": torch.zeros(6, 63)}, "rotary dimension 63: expected an even number up to 64"),
        ({"table": torch.zeros(6, 66)}, "rotary dimension 66"),
        ({"table": torch.zeros(64, 6).t()}, "table"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], says: str, device: torch.device) -> None:
    case = Case((1, 70), device=device)
    vars(case).update({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(ValueError, match=says):
        case.run()


def test_the_kernels_serve_cuda() -> None:
    assert choose(64, "cuda") is operators and refuses(64, "cuda") is None
    for size in (20, 264, 0):
        assert refuses(size, "cuda") == f"head size {size} (expected a multiple of 8 up to 256)"
        with pytest.raises(ValueError, match=f"span attention: head size {size} "):
            choose(size, "cuda")
    assert operators.refuses(64, "cpu") == "written for cuda, not cpu"
