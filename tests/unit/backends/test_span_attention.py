"""Span attention, merging and log-sum-exps against float64."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops import extension
from vllm_hypic.backends.ops.span_attention import choose, eager, native, reference
from vllm_hypic.backends.ops.span_attention.eager import causal_lse, merge
from vllm_hypic.backends.ops.span_attention.reference import merge_reference
from vllm_hypic.pool.tensors import quantised

from .cases import DTYPES, LSE_TOLERANCE, Cached, Case, Parts

KERNELS = pytest.mark.parametrize("kernels", [eager, native], ids=["eager", "c++"])
BOTH_KERNELS = pytest.mark.parametrize("versions", [(eager, native)], ids=["eager c++"])
"""The reference runs once for both."""


def test_the_kernels_are_built() -> None:
    """Tests of C++ kernels must not pass because nothing was built."""
    assert extension.missing() is None
    assert choose(64, "cpu") is native and choose(72, "cpu") is eager


SCALES = 0.75, 2.5
"""Of K and V in FP8; no powers of two, so that what is read in bfloat16 is rounded once more."""


class Quantised(Case):
    """K and V as FP8 times :data:`SCALES`, of the query's dtype no more."""

    more_rounding = 1.5

    def run(self, kernels: ModuleType, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        case = copy.copy(self)
        case.key, case.value = (
            quantised(t, by) for t, by in zip((self.key, self.value), SCALES, strict=True)
        )
        return Case.run(case, kernels, None, 0.0, *SCALES)


REQUESTS = [
    *(([(rows, columns)], {"seed": rows + columns}) for rows in (1, 7, 64) for columns in (1, 63, 500)),
    ([(1, 300), (5, 1), (33, 270), (1, 257)], {}),
    # More columns than one part of the kernel has, and a part, a tile and a row block that are not full.
    *(([(rows, 8_500)], {"size": 32, "heads": 8, "rotary": 16}) for rows in (1, 300)),
    # More rows than one part has.
    ([(1500, 300), (1, 40)], {"size": 16, "heads": 2, "kv_heads": 1}),
]


@BOTH_KERNELS
@pytest.mark.parametrize("kind", [Case, Quantised], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("requests", "shape"), REQUESTS)
def test_requests(requests: list, shape: dict, dtype: torch.dtype, kind: type, versions: Any) -> None:
    kind(*requests, **shape, dtype=dtype).check(*versions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_share_memory(dtype: torch.dtype) -> None:
    case = Case((20, 5000), (1, 9000), (40, 300), heads=8, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out, lse = case.run(native)
        torch.set_num_threads(4)
        for _ in range(5):
            again, again_lse = case.run(native)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_request_does_not_feel_its_neighbours(dtype: torch.dtype) -> None:
    case = Case((9, 5000), (2, 300), dtype=dtype)
    out, lse = case.run(native)
    case.query_ranges, case.visible_kv_lens = case.query_ranges[:1], case.visible_kv_lens[:9]
    case.slots, case.positions = case.slots[:1], case.positions[:1]
    alone, alone_lse = case.run(native)
    assert torch.equal(out[:9], alone) and torch.equal(lse[:9], alone_lse)


@KERNELS
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_heads(group: int, size: int, kernels: ModuleType) -> None:
    for dtype in DTYPES:
        Case((7, 63), heads=2 * group, size=size, dtype=dtype, seed=group).check(kernels)


@KERNELS
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [0, 2, 16, 48, 64])
def test_rotations(rotary: int, neox: bool, kernels: ModuleType) -> None:
    for dtype in DTYPES:
        for table in (dtype, torch.float32):
            case = Case((7, 63), rotary=rotary, neox=neox, dtype=dtype, table_dtype=table, seed=rotary)
            case.check(kernels)


@KERNELS
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    ("kind", "size", "rotary"),
    [*((Case, 192, n) for n in (0, 32, 64, 128, 192)), *((Quantised, 128, n) for n in (0, 64, 128))],
)
def test_rotations_of_few_rows(
    kind: type[Case], size: int, rotary: int, neox: bool, kernels: ModuleType
) -> None:
    """In bf16 with angles in bf16, multiples of 64 dimensions are rotated as pairs."""
    shape: Any = {"size": size, "rotary": rotary, "neox": neox, "dtype": torch.bfloat16}
    for table in (torch.bfloat16, torch.float32):
        kind((1, 700), (2, 63), **shape, table_dtype=table).check(kernels)


@KERNELS
@pytest.mark.parametrize("columns", [1, 31, 300, 513])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "heads"), [(1, 4, 12), (1, 6, 18), (2, 8, 24), (1, 48, 48), (4, 2, 4), (1, 3, 24)]
)
def test_few_rows_many_heads(rows: int, kv_heads: int, heads: int, columns: int, kernels: ModuleType) -> None:
    """AMX computes 16 rows at once, of several kv heads: those of one may lie in two such blocks."""
    for size in (64, 192):
        case = Case((rows, columns), heads=heads, kv_heads=kv_heads, size=size, dtype=torch.bfloat16)
        case.check(kernels)


@KERNELS
@pytest.mark.parametrize("seen", [0, 1, 62, 63])
def test_all_rows_see_the_same(seen: int, kernels: ModuleType) -> None:
    case = Case((7, 63))
    case.visible_kv_lens = torch.full((7,), seen)
    case.check(kernels)


@KERNELS
def test_unlike_scores(kernels: ModuleType) -> None:
    """Online softmax: the largest score comes first, last, or is so large that the others vanish."""
    for factor in (1.0, 30.0, -30.0):
        case = Case((5, 700))
        case.key[case.slots[0]] *= torch.linspace(0, factor, 700)[:, None, None]
        case.check(kernels, larger=abs(factor))


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize(("kind", "cap"), [(Case, 0.0), (Case, 5.0), (Quantised, 0.0)])
def test_what_is_no_number_is_not_passed_over(
    kind: type[Case], cap: float, what: str, rows: int, dtype: torch.dtype, kernels: ModuleType
) -> None:
    case = kind((rows, 300), dtype=dtype)
    getattr(case, what)[case.slots[0][270]] = float("nan")
    case.visible_kv_lens[:] = 300
    out, lse = case.run(kernels, None, cap)
    assert out.isnan().all()
    assert lse.isnan().all() == (what == "key")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": [torch.tensor([99])]}, "in slot 99 of 7"),
        ({"slots": [torch.tensor([-1])]}, "in slot -1 of 7"),
        ({"positions": [torch.tensor([5000])]}, "at position 5000 of 5000"),
        ({"visible_kv_lens": torch.tensor([2])}, "sees 2 of 1 columns"),
        ({"query_ranges": torch.tensor([[3, 99]])}, r"rows \[3, 99\) of 6"),
        ({"slots": []}, "one tensor of slots"),
        ({"key": torch.zeros(7, 2, 32)}, "with contiguous heads"),
        ({"key": torch.zeros(7, 2, 64).half()}, "one dtype"),
        ({"query": torch.zeros(6, 4, 72)}, "head size 72: expected a multiple of 16"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], says: str) -> None:
    """Never read or written out of bounds."""
    case = Case((1, 1))
    vars(case).update(change)
    with pytest.raises((ValueError, TypeError, IndexError), match=says):
        case.run(native)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "size"), [(16, 32), (48, 80)])
def test_cache_lse(block: int, size: int, dtype: torch.dtype) -> None:
    requests = (1, 1), (1, 40), (7, 7), (5, 33), (60, 300), (2, 260)
    case = Cached(*requests, dtype=dtype, block=block, size=size)
    ours = eager.cache_lse(*case.lse_arguments)
    error = (ours.double() - reference.cache_lse(*case.lse_arguments)).abs().max()
    assert float(error) <= LSE_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_in_place(dtype: torch.dtype) -> None:
    parts = Parts(dtype, 48)
    eager.merge_(parts.output, parts.lse, parts.other, parts.other_lse, parts.query_ranges)
    parts.check(parts.output)


def part(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 8, generator=rng), 10 * torch.randn(rows, 2, generator=rng)


SEEDS = st.integers(0, 2**20)


@given(st.tuples(SEEDS, SEEDS, SEEDS))
def test_merge_is_right_symmetric_and_associative(seeds: tuple[int, int, int]) -> None:
    """Merging with nothing changes nothing."""
    (a, la), (b, lb), (c, lc) = (part(5, seed) for seed in seeds)
    ours = merge(a, la, b, lb)
    torch.testing.assert_close(ours.double(), merge_reference(a, la, b, lb), rtol=1e-5, atol=1e-6)
    assert torch.equal(ours, merge(b, lb, a, la))
    left = merge(ours, torch.logaddexp(la, lb), c, lc)
    right = merge(a, la, merge(b, lb, c, lc), torch.logaddexp(lb, lc))
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    nothing = torch.zeros_like(a), torch.full_like(la, float("-inf"))
    assert torch.equal(merge(a, la, *nothing), a)
    assert torch.equal(merge(*nothing, a, la), a)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), SEEDS, st.sampled_from([eager, native]))
def test_columns_split_anywhere(first: int, second: int, seed: int, kernels: ModuleType) -> None:
    """Two spans merged are the span over both, for rows that end anywhere."""
    case = Case((5, first + second), seed=seed)
    whole, lse = case.run(kernels)
    slots, positions, visible_kv_lens = case.slots[0], case.positions[0], case.visible_kv_lens

    def span(columns: slice, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        case.slots, case.positions = [slots[columns].clone()], [positions[columns].clone()]
        case.visible_kv_lens = seen
        return case.run(kernels)

    head = span(slice(first), visible_kv_lens.clamp(max=first))
    tail = span(slice(first, None), (visible_kv_lens - first).clamp(min=0))
    seen = visible_kv_lens > 0
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
    assert float((causal_lse(query, key, 1 / 8).double() - wanted).abs().max()) <= LSE_TOLERANCE[dtype]
