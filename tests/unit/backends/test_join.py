"""Rows that see public columns and tokens of vLLM's cache, at once, against float64."""

from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import Layout, PoolColumns, native, reference

from .cases import DTYPES, LAYOUTS, TOLERANCE, Cached, Case
from .test_span_attention import BOTH_KERNELS, KERNELS

REQUESTS = (1, 70, 1), (1, 4_600, 600), (7, 40, 7), (5, 300, 33), (60, 0, 900)
"""Rows, public columns and tokens in the cache of each."""


class Joined:
    """``window``: how many columns and tokens a row sees at most, so that it is replaced; ``None``: all, and
    ``output`` has what stock would."""

    def __init__(
        self,
        *requests: tuple[int, int, int],
        window: int | None = None,
        size: int = 32,
        dtype: torch.dtype = torch.float32,
        sinks: bool = False,
        cap: float = 0.0,
        **paged: Any,
    ) -> None:
        """``paged``: options of :class:`Cached` alone."""
        shape: dict[str, Any] = {"size": size, "dtype": dtype}
        case = Case(*((rows, columns) for rows, columns, _ in requests), **shape)
        cached = Cached(*((rows, tokens) for rows, _, tokens in requests), **shape, window=window, **paged)
        self.query, self.scale, self.cap = case.query, case.scale, cap
        self.ranges = torch.cat([case.query_ranges, cached.query_ranges[:, 2:]], 1)
        hidden = None if window is None else (case.visible_kv_lens - window).clamp(min=0)
        self.pool = PoolColumns(
            *(case.key, case.value, case.slots, case.positions, case.table, case.neox),
            *(case.visible_kv_lens, hidden),
        )
        self.cache = cached.columns
        self.sinks = torch.linspace(-2, 3, case.query.shape[1]) if sinks else None
        self.rows = torch.cat([torch.arange(first, last) for first, last in case.query_ranges.tolist()])
        self.output = torch.full_like(self.query, float("nan"))
        if window is None:
            index = self.cache.key_index, self.cache.value_index
            out, lse = reference.cache_attention(
                *(self.query, self.cache.cache, *index, self.cache.block_table, self.ranges, self.scale),
                *(torch.zeros(len(self.rows), dtype=torch.int64), cap),
            )
            if self.sinks is not None:
                out = out * (lse - torch.logaddexp(lse, self.sinks.double())).exp()[..., None]
            self.output[self.rows] = out.to(dtype)
            self.cache = self.cache._replace(value_index=None, hidden=None)

    def run(self, ops: ModuleType) -> torch.Tensor:
        output = self.output.clone()
        columns = self.pool, self.cache
        ops.join_(output, self.query, self.ranges, self.scale, *columns, self.sinks, self.cap)
        others = torch.ones(len(output), dtype=torch.bool)
        others[self.rows] = False
        assert output[others].isnan().all()
        return output[self.rows].double()

    def check(self, *versions: ModuleType) -> torch.Tensor:
        assert versions
        wanted = self.run(reference)
        for ops in versions:
            print(ops.__name__)
            assert float((self.run(ops) - wanted).abs().max()) <= 4 * TOLERANCE[self.query.dtype]
        return wanted


@BOTH_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LAYOUTS
@pytest.mark.parametrize("window", [None, 1, 20, 255, 256, 3000])
def test_rows(
    window: int | None, layout: Layout, block: int, size: int, dtype: torch.dtype, versions: Any
) -> None:
    Joined(*REQUESTS, window=window, layout=layout, block=block, size=size, dtype=dtype).check(*versions)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_count_once(window: int | None, dtype: torch.dtype, kernels: ModuleType) -> None:
    """In the private part's weight, which stock counted them in; twice or never is seen."""
    joined = Joined(*REQUESTS, window=window, dtype=dtype, sinks=True)
    wanted = joined.check(kernels)
    joined.sinks = None
    assert float((joined.run(kernels) - wanted).abs().max()) > 20 * TOLERANCE[dtype]


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_caps(window: int | None, cap: float, dtype: torch.dtype, kernels: ModuleType) -> None:
    Joined(*REQUESTS, window=window, dtype=dtype, cap=cap).check(kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 600])
def test_a_request_feels_neither_neighbours_nor_threads(window: int | None, dtype: torch.dtype) -> None:
    joined = Joined((2, 4_600, 900), (9, 5_000, 700), window=window, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        both = joined.run(native)
        torch.set_num_threads(4)
        assert torch.equal(joined.run(native), both)
    finally:
        torch.set_num_threads(threads)
    joined.ranges, joined.rows, joined.output[3 + 2 :] = joined.ranges[:1], joined.rows[:2], float("nan")
    hidden = [part if part is None else part[:2] for part in (joined.pool.hidden, joined.cache.hidden)]
    first = {name: getattr(joined.pool, name)[:1] for name in ("slot_mapping", "kv_positions")}
    seen = joined.pool.visible_kv_lens[:2]
    joined.pool = joined.pool._replace(**first, visible_kv_lens=seen, hidden=hidden[0])
    joined.cache = joined.cache._replace(hidden=hidden[1])
    assert torch.equal(joined.run(native), both[:2])


@pytest.mark.parametrize("what", ["key_index", "value_index"])
def test_what_is_no_number_is_not_passed_over(what: str) -> None:
    for dtype in DTYPES:
        joined = Joined((3, 70, 40), window=40, dtype=dtype)
        index: torch.Tensor = getattr(joined.cache, what)
        joined.cache.cache[joined.cache.block_table[1, 2].long(), index[37 % 16].long()] = float("nan")
        assert joined.run(native).isnan().all()


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("cache", {"block_table": torch.tensor([[0, 0, 0], [0, 0, 99]], dtype=torch.int32)}, "block 99 of 5"),
        ("cache", {"hidden": torch.tensor([40])}, "row 0 of request 0 hides 40 of 40 tokens"),
        ("cache", {"hidden": torch.tensor([-1])}, "hides -1 of 40"),
        ("cache", {"layout": 3}, "layout 3: expected 0, 1 or 2"),
        ("cache", {"key_index": torch.zeros(16, 1, 32, dtype=torch.int32)}, "as many kv heads"),
        ("pool", {"hidden": torch.tensor([-1])}, "hides -1 columns"),
        ("pool", {"visible_kv_lens": torch.tensor([71])}, "sees 71 of 70 columns"),
        ("pool", {"visible_kv_lens": torch.tensor([1, 1])}, r"visible_kv_lens must be int64 \[1\]"),
    ],
)
def test_bad_arguments_are_refused(part: str, change: dict[str, object], says: str) -> None:
    """Never read or written out of bounds."""
    joined = Joined((1, 70, 40), window=40)
    setattr(joined, part, getattr(joined, part)._replace(**change))
    with pytest.raises((ValueError, IndexError), match=says):
        joined.run(native)


def test_of_sinks_a_float_a_head() -> None:
    joined = Joined((1, 70, 40), window=40)
    joined.sinks = torch.zeros(3)
    with pytest.raises(ValueError, match=r"sinks must be float32 \[4\]"):
        joined.run(native)
