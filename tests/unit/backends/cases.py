"""Requests over one pool of public columns, in a cache that is paged as vLLM's, and parts to be merged.

``tests/cuda/triton`` has the same on a device.
"""

from types import ModuleType

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import CacheColumns, Layout, reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an output relative to the largest value, about four roundings of the dtype: K is
rounded once after its rotation, probabilities once before they weigh V, the result once."""
LSE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Absolute: scores have a standard deviation of one and an error of the rounding of K."""
DTYPES = list(TOLERANCE)
POSITIONS = 5000
Attended = tuple[torch.Tensor, torch.Tensor]
"""What rows see, weighted, and its log-sum-exp."""


def cos_sin_table(rotary: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[POSITIONS, rotary]``: cos, then sin."""
    angles = torch.arange(POSITIONS)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


class Case:
    """Random requests over one pool; pool rows that are no column of a request, and query rows of nobody,
    hold NaN.  Of each request the first row sees nothing, the last everything.

    ``rotary=None``: all dimensions are rotated; 0: none.
    """

    more_rounding = 1.0

    def __init__(
        self,
        *requests: tuple[int, int],
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 64,
        rotary: int | None = None,
        neox: bool = True,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """``requests``: rows and columns of each."""
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(dtype)

        columns = sum(c for _, c in requests)
        pool = 2 * columns + 5
        places = torch.randperm(pool, generator=rng)[:columns]
        self.slots = list(places.split([c for _, c in requests]))
        self.key, self.value = (torch.full((pool, kv_heads, size), float("nan"), dtype=dtype) for _ in "kv")
        self.key[places] = normal(columns, kv_heads, size)
        self.value[places] = normal(columns, kv_heads, size)
        self.positions = [torch.randint(0, POSITIONS, (c,), generator=rng) for _, c in requests]
        rotary = size if rotary is None else rotary
        self.table = cos_sin_table(rotary, table_dtype or dtype) if rotary else None
        self.neox, self.scale, self.dtype = neox, size**-0.5, dtype
        query_ranges, visible_kv_lens, at = [], [], 0
        for rows, c in requests:
            at += 3  # rows of somebody else
            query_ranges.append((at, at + rows))
            at += rows
            seen = torch.randint(0, c + 1, (rows,), generator=rng)
            seen[0], seen[-1] = 0, c
            visible_kv_lens.append(seen)
        self.query_ranges, self.visible_kv_lens = torch.tensor(query_ranges), torch.cat(visible_kv_lens)
        self.hidden_kv_lens: torch.Tensor | None = None
        self.query = torch.full((at + 2, heads, size), float("nan"), dtype=dtype)
        for first, last in query_ranges:
            self.query[first:last] = normal(last - first, heads, size)

    def run(
        self, kernels: ModuleType, hidden: torch.Tensor | None = None, cap: float = 0.0, *scales: float
    ) -> Attended:
        return kernels.span_attention(
            *(self.query, self.key, self.value, self.slots, self.positions, self.table, self.neox),
            *(self.visible_kv_lens, self.query_ranges, self.scale, hidden, cap, *scales),
        )

    def check(self, *versions: ModuleType, larger: float = 1.0) -> None:
        """Compare each of ``versions`` with the reference, which runs once.

        ``larger``: how much larger scores, and with them errors, are than of standard deviation one.
        """
        assert versions
        wanted = self.run(reference)
        for kernels in versions:
            print(kernels.__name__)
            self.compare(*self.run(kernels), wanted, larger)

    def compare(self, out: torch.Tensor, lse: torch.Tensor, wanted: Attended, larger: float = 1.0) -> None:
        larger *= self.more_rounding
        wanted_out, wanted_lse = wanted
        assert out.dtype == lse.dtype == torch.float32
        assert out.shape == wanted_out.shape == (len(self.visible_kv_lens), *self.query.shape[1:])
        assert lse.shape == wanted_lse.shape == out.shape[:2]
        largest = float(self.value[torch.cat(self.slots)].abs().nan_to_num(0.0).max())
        error = float((out.double() - wanted_out).abs().max()) / largest
        assert error <= larger * TOLERANCE[self.dtype], error
        blind = self.visible_kv_lens <= (0 if self.hidden_kv_lens is None else self.hidden_kv_lens)
        assert (lse[blind] == float("-inf")).all() and (out[blind] == 0).all()
        if not blind.all():
            error = float((lse.double() - wanted_lse)[~blind].abs().max())
            assert error <= larger * LSE_TOLERANCE[self.dtype], error


def indices(
    layout: Layout, block: int, heads: int, size: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the elements of K and V ``[block, heads, size]`` lie in a block, which has twice as many."""
    count = block * heads * size
    if layout is Layout.ANYWHERE:
        key, value = (torch.randperm(2 * count, generator=rng)[: 2 * count] + 2).view(2, block, heads, size)
    elif layout is Layout.LINES:
        key = torch.arange(count).view(heads, size, block).permute(2, 0, 1)
        value = torch.arange(count, 2 * count).view(heads, block, size).transpose(0, 1)
    else:
        key = torch.arange(count).view(block // 16, heads, size // 2, 16, 2).permute(0, 3, 1, 2, 4)
        value = torch.arange(count, 2 * count).view(heads, block // 2, size // 16, 16, 2)
        value = value.permute(1, 4, 0, 2, 3)
    return tuple(index.reshape(block, heads, size).int().contiguous() for index in (key, value))  # type: ignore[return-value]


class Cached:
    """What no row sees, and what is nobody's, is NaN: blocks before a window, which vLLM gives away, too."""

    def __init__(
        self,
        *requests: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        group: int = 2,
        block: int = 16,
        size: int = 32,
        layout: Layout = Layout.ANYWHERE,
        window: int | None = None,
    ) -> None:
        """``requests``: rows and tokens of each."""
        rng = torch.Generator().manual_seed(len(requests))
        kv_heads = 2
        self.key_index, self.value_index = indices(layout, block, kv_heads, size, rng)
        self.layout, self.scale = layout, size**-0.5
        blocks = [-(-tokens // block) for _, tokens in requests]
        self.table = torch.full((len(requests) + 1, max(blocks)), 10**6, dtype=torch.int32)
        order = torch.randperm(sum(blocks) + 2, generator=rng).int()
        self.cache = torch.full((len(order), 2 * block * kv_heads * size + 2), float("nan"), dtype=dtype)
        query_ranges, hidden, at = [], [], 0
        for i, (rows, tokens) in enumerate(requests):
            self.table[i + 1, : blocks[i]], order = order[: blocks[i]], order[blocks[i] :]
            begins = torch.arange(tokens - rows, tokens) - (tokens if window is None else window - 1)
            hidden.append(begins.clamp(min=0))
            seen = torch.arange(int(hidden[-1].min()), tokens)
            where = self.table[i + 1].long()[seen // block][:, None, None]
            for index in (self.key_index, self.value_index):
                values = torch.randn(len(seen), kv_heads, size, generator=rng).to(dtype)
                self.cache[where, index.long()[seen % block]] = values
            if window is not None:
                self.table[i + 1, : int(seen[0]) // block] = len(self.cache) - 1
            query_ranges.append((at + 1, at + 1 + rows, i + 1, tokens))
            at += rows + 1
        self.query_ranges, self.hidden = torch.tensor(query_ranges), torch.cat(hidden)
        self.query = torch.full((at + 1, group * kv_heads, size), float("nan"), dtype=dtype)
        for first, last, *_ in query_ranges:
            self.query[first:last] = torch.randn(last - first, *self.query.shape[1:], generator=rng).to(dtype)

    @property
    def lse_arguments(self) -> tuple:
        return self.query, self.cache, self.key_index, self.table, self.query_ranges, self.scale

    @property
    def attention_arguments(self) -> tuple:
        index = self.key_index, self.value_index
        return self.query, self.cache, *index, self.table, self.query_ranges, self.scale, self.hidden

    @property
    def columns(self) -> CacheColumns:
        return CacheColumns(
            self.cache, self.key_index, self.value_index, self.table, self.hidden, self.layout
        )


LAYOUTS = pytest.mark.parametrize(
    ("layout", "block", "size"),
    [
        (Layout.ANYWHERE, 16, 32),
        (Layout.LINES, 16, 32),
        (Layout.LINES, 48, 80),
        (Layout.PAIRS, 32, 80),
        (Layout.PAIRS, 16, 64),
    ],
    ids=["anywhere", "lines", "lines-48", "pairs", "pairs-64"],
)


class Parts:
    """Parts of attention to be merged in rows ``NAMED`` of 34 tokens; what must not be read is NaN."""

    NAMED = (*range(1, 4), *range(5, 11), *range(12, 33))
    OTHERS = (0, 4, 11, 33)

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        rng, rows = torch.Generator().manual_seed(size), len(self.NAMED)
        self.output = torch.randn(34, 4, size, generator=rng).to(dtype)
        self.output[[*self.OTHERS]] = float("nan")
        self.lse, self.other_lse = (8 * torch.randn(rows, 4, generator=rng) for _ in range(2))
        self.other = torch.randn(rows, 4, size, generator=rng)
        self.lse[3], self.other_lse[5], self.other_lse[6, 2] = float("-inf"), float("-inf"), float("-inf")
        self.wanted = self.output.clone()
        self.query_ranges = torch.tensor([[1, 4, 0, 0], [5, 11, 0, 0], [12, 33, 0, 0]])
        reference.merge_(self.wanted, self.lse, self.other, self.other_lse, self.query_ranges)

    def check(self, output: torch.Tensor) -> None:
        """Rows between the named ones stay as they are."""
        assert output[[*self.OTHERS]].isnan().all()
        found, wanted = (t[[*self.NAMED]].float() for t in (output, self.wanted))
        # One rounding of the result.
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(output.dtype).eps, atol=1e-6)
