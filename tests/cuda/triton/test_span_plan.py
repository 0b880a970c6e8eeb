"""The plan of span attention: every row meets every column that it sees exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.backends.ops.span_attention import plan as span_plan
from vllm_hypic.backends.ops.span_attention.plan import FEW_ROWS, SpanColumns, SpanPlan, SpanWork

CPU = torch.device("cpu")
REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3000)), min_size=1, max_size=5)


def columns_of(counts: list[int]) -> SpanColumns:
    slots = [torch.arange(c) + 10_000 * i for i, c in enumerate(counts)]
    return SpanColumns.of(slots, [s + 1 for s in slots])


@given(
    REQUESTS,
    st.sampled_from([1, 3, 4, 8]),
    st.integers(1, 4),
    st.integers(0, 2**20),
    st.sampled_from([None, 1, 100, 5000]),
)
def test_every_row_meets_what_it_sees_once(
    requests: list[tuple[int, int]], group: int, kv_heads: int, seed: int, window: int | None
) -> None:
    rng = np.random.default_rng(seed)
    rows, counts = [r for r, _ in requests], [c for _, c in requests]
    first = np.cumsum([2 + r for r in rows]) - rows
    query_ranges = np.stack([first, first + rows], 1)
    visible_kv_lens = np.concatenate([rng.integers(0, c + 1, r) for r, c in requests])
    hidden = None
    if window is not None:
        hidden = np.maximum(visible_kv_lens - window + rng.integers(0, 9, len(visible_kv_lens)), 0)
    heads = group * kv_heads, kv_heads, 64, torch.bfloat16
    plan = SpanPlan.of(columns_of(counts), query_ranges, visible_kv_lens, *heads, hidden)

    assert plan.token_rows.tolist() == [t for a, b in query_ranges.tolist() for t in range(a, b)]
    assert plan.visible_kv_lens.tolist() == visible_kv_lens.tolist()
    if hidden is None:
        assert plan.hidden_kv_lens is None
        hidden = np.zeros_like(visible_kv_lens)
    else:
        assert plan.hidden_kv_lens is not None and plan.hidden_kv_lens.tolist() == hidden.tolist()
    outputs = np.cumsum(rows) - rows
    requests_of = {int(o): i for i, (o, r) in enumerate(zip(outputs, rows, strict=True)) if r}
    met = np.zeros((sum(rows), group, max(counts)), dtype=np.int64)
    written = np.zeros((sum(rows), group), dtype=bool)
    for work in plan.work:
        assert check_partials(work) == set(range(work.partial_rows))
        for item in work.items.tolist():
            query, output, count, folded, first_column, begin, end, _ = item
            i = requests_of[output]
            assert (query, count) == (query_ranges[i, 0], rows[i])
            assert first_column == sum(counts[:i])
            assert (work.block == FEW_ROWS) == (count * group <= FEW_ROWS)
            assert end - begin <= span_plan.part_columns(kv_heads, work.block)
            assert end <= counts[i]
            tile = range(folded, min(folded + work.block, count * group))
            seen = [(hidden[r], visible_kv_lens[r]) for r in {output + f // group for f in tile}]
            # Somebody sees the part, and a tile that sees nothing writes so.
            assert end == begin or any(max(a, begin) < min(b, end) for a, b in seen)
            for f in tile:
                met[output + f // group, f % group, begin:end] += 1
                written[output + f // group, f % group] = True
    assert written.all()
    for row, seen in enumerate(visible_kv_lens):
        assert (met[row, :, hidden[row] : seen] == 1).all()
    assert met.max(initial=0) <= 1


@pytest.mark.parametrize("heads", [4, 16])
def test_what_a_window_costs_does_not_grow_with_the_columns(heads: int) -> None:
    """One token, and four seams of 8 tokens far apart, in one tile or in one each: two parts at most for
    each."""
    n = 800_000
    seen = np.append(n, np.repeat(np.arange(1, 5) * (n // 4), 8))
    given = np.array([[0, 1], [1, 33]]), seen, heads, 2, 64, torch.bfloat16
    plan = SpanPlan.of(columns_of([n, n]), *given, seen - 300)
    met = sum(int((w.items[:, 6] - w.items[:, 5]).sum()) for w in plan.work)
    many = span_plan.part_columns(2, span_plan.many_rows(64, torch.bfloat16, CPU))
    assert 5 * 300 <= met <= 2 * span_plan.part_columns(2, FEW_ROWS) + 4 * 2 * many


def check_partials(work: SpanWork) -> set[int]:
    """The partial rows of split tiles: disjoint, and each merge names those of its tile's items."""
    found: set[int] = set()
    items = work.items.tolist()
    split = {}
    for item in items:
        if item[7] >= 0:
            split.setdefault((item[1], item[3]), []).append(item)
    merges = {(m[0], m[1]): m for m in work.merges.tolist()}
    assert merges.keys() == split.keys()
    for tile, parts in split.items():
        _, _, length, first, count = merges[tile][:5]
        assert [p[7] for p in parts] == [first + i * length for i in range(count)]
        assert count > 1
        rows = set(range(first, first + count * length))
        assert not rows & found
        found |= rows
    # Each tile is there once, or once per part.
    whole = [(i[1], i[3]) for i in items if i[7] < 0]
    assert len(set(whole)) == len(whole) and not set(whole) & split.keys()
    return found


def test_columns_follow_one_another() -> None:
    columns = columns_of([3, 0, 2])
    assert columns.counts == (3, 0, 2)
    assert columns.slots.tolist() == [0, 1, 2, 20_000, 20_001]
    assert columns.positions.tolist() == [1, 2, 3, 20_001, 20_002]
    assert columns.slots.dtype == columns.positions.dtype == torch.int32


def test_arrays_are_aligned() -> None:
    """Kernels are compiled anew for pointers of another alignment."""
    plan = SpanPlan.of(columns_of([700, 9]), np.array([[0, 3], [3, 40]]), np.full(40, 9), 4, 1, 64)
    for work in plan.work:
        for array in (work.items, work.merges, plan.visible_kv_lens, plan.token_rows):
            assert array.storage_offset() % 16 == 0


@pytest.mark.parametrize(
    ("capability", "size", "rows"),
    [((8, 0), 128, 64), ((9, 0), 256, 128), ((10, 0), 128, 128), ((10, 0), 256, 64)],
)
def test_tiles_fit_the_gpu(
    capability: tuple[int, int], size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``SPECS`` of the kernel have them compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda, many_rows = torch.device("cuda"), span_plan.many_rows
    assert many_rows(size, torch.bfloat16, cuda) == many_rows(size, torch.float16, cuda) == rows
    assert many_rows(size, torch.float32, cuda) == (64 if size == 128 else 32)
    assert many_rows(size, torch.bfloat16, torch.device("cpu")) == 64
