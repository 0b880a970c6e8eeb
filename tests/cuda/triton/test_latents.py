"""Attention over latents, and their capture, in Triton against float64."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from backends.cases import DTYPES, POSITIONS, TOLERANCE, cos_sin_table

from vllm_hypic.backends.ops.span_attention import plan, reference
from vllm_hypic.backends.ops.span_attention.columns import CacheColumns, PoolColumns
from vllm_hypic.backends.ops.span_attention.eager import unrotate
from vllm_hypic.backends.ops.span_attention.plan import SpanColumns, SpanPlan, causal_kv_lens
from vllm_hypic.backends.ops.span_attention.triton.capture import capture_latents_
from vllm_hypic.backends.ops.span_attention.triton.latents import attend_latents, join_latents, refuses

ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Request = tuple[int, int, int]
"""Rows, public columns, tokens in vLLM's cache."""
MIXED: tuple[Request, ...] = ((1, 70, 1), (5, 0, 9), (1, 33, 40), (13, 130, 77), (3, 1, 3))


@dataclass
class Latents:
    """Requests over one pool and one cache of vLLM's.  Slots, blocks and rows of blocks that nobody has are
    NaN.  Of each request the first of several rows sees nothing public, the last everything."""

    requests: tuple[Request, ...]
    device: torch.device
    dtype: torch.dtype = torch.float32
    heads: int = 4
    rank: int = 32
    rope: int = 16
    block_size: int = 16
    neox: bool = False
    rotated: bool = True
    padding: int = 0
    """Elements between the blocks of the cache, as where other layers share its pages."""

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(3)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=rng).to(self.dtype)

        def nan(*sizes: int) -> torch.Tensor:
            return torch.full(sizes, float("nan"), dtype=self.dtype)

        size = self.rank + self.rope
        rows, counts, tokens = (list(part) for part in zip(*self.requests, strict=True))
        places = torch.randperm(2 * sum(counts) + 5, generator=rng)
        pool = nan(len(places), 1, size)
        taken = places[: sum(counts)]
        pool[taken] = normal(len(taken), 1, size)
        self.pool, self.slots = pool.to(self.device), [s.to(self.device) for s in taken.split(counts)]
        self.positions = [torch.randint(0, POSITIONS, (c,), generator=rng).to(self.device) for c in counts]

        blocks = [-(-n // self.block_size) for n in tokens]
        order = torch.randperm(2 * sum(blocks) + 1, generator=rng).int()
        self.block_table = torch.full((len(blocks), max(blocks) + 1), len(order) - 1, dtype=torch.int32)
        whole = nan(len(order), self.block_size * size + self.padding)
        self.cache = whole[:, : self.block_size * size].view(len(order), self.block_size, size)
        for i, n in enumerate(tokens):
            mine = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
            self.block_table[i, : len(mine)] = mine
            for token in range(n):
                self.cache[mine[token // self.block_size], token % self.block_size] = normal(size)
        whole = whole.to(self.device)
        self.cache = whole[:, : self.block_size * size].view(len(order), self.block_size, size)
        self.block_table = self.block_table.to(self.device)

        ends = np.cumsum(rows)
        self.ranges = np.stack([ends - rows, ends, np.arange(len(rows)), tokens], 1)
        self.seen = torch.cat(
            [torch.linspace(0, c, r).long() if r > 1 else torch.tensor([c]) for r, c, _ in self.requests]
        )
        self.query, self.query_pe = (
            normal(int(ends[-1]), self.heads, n).to(self.device) for n in (self.rank, self.rope)
        )
        table = 1.1 * cos_sin_table(self.rope, torch.float32) if self.rotated else None
        self.table = None if table is None else table.to(self.dtype).to(self.device)
        self.scale = size**-0.5

    def plans(self) -> tuple[SpanPlan, SpanPlan]:
        cached = SpanColumns.cached(self.block_table, self.ranges[:, 2], self.ranges[:, 3])
        shape = self.heads, 1, self.rank, self.dtype
        return (
            SpanPlan.of(SpanColumns.of(self.slots, self.positions), self.ranges, self.seen.numpy(), *shape),
            SpanPlan.of(cached, self.ranges, causal_kv_lens(self.ranges), *shape),
        )

    def run(self) -> torch.Tensor:
        given = self.query, self.query_pe, self.pool, self.cache, self.block_table, self.table, self.neox
        return join_latents(*given, *self.plans(), self.scale).cpu()

    def wanted(self) -> torch.Tensor:
        """In float64: one KV head, whose K the reference takes for V, too."""
        size = self.rank + self.rope
        order = torch.tensor([*range(self.rank, size), *range(self.rank)])
        index = (torch.arange(self.block_size)[:, None, None] * size + order).int()
        table = None if self.table is None else self.table.cpu()
        pool, cache = self.pool.cpu(), self.cache.cpu().contiguous()
        on_host = [[t.cpu() for t in ts] for ts in (self.slots, self.positions)]
        query = torch.cat([self.query_pe, self.query], -1).cpu()
        joined = torch.zeros(query.shape, dtype=torch.float64)
        reference.join_(
            joined,
            query,
            torch.from_numpy(self.ranges),
            self.scale,
            PoolColumns(pool, pool, *on_host, table, self.neox, self.seen),
            CacheColumns(cache, index, index, self.block_table.cpu()),
        )
        return joined[..., self.rope :]

    def error(self) -> float:
        """Largest error relative to the largest latent, about 4."""
        found = self.run()
        assert found.dtype == torch.float32 and not found.isnan().any()
        return float((found.double() - self.wanted()).abs().max()) / 4

    def check(self) -> None:
        assert (error := self.error()) <= TOLERANCE[self.dtype], error


@ALL_DTYPES
@pytest.mark.parametrize(("neox", "rotated"), [(True, True), (False, True), (False, False)])
def test_mixed_requests(neox: bool, rotated: bool, dtype: torch.dtype, device: torch.device) -> None:
    Latents(MIXED, device, dtype, neox=neox, rotated=rotated).check()


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block_size"),
    [(1, 16, 16, 1), (3, 48, 32, 24), (20, 64, 48, 64), (5, 80, 64, 16)],
)
def test_sizes(heads: int, rank: int, rope: int, block_size: int, device: torch.device) -> None:
    shape = dict(heads=heads, rank=rank, rope=rope, block_size=block_size)
    Latents(MIXED, device, padding=32, **shape).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_sizes_of_deepseek(dtype: torch.dtype, device: torch.device) -> None:
    """Latents of 512, keys of 64, heads of one of eight ranks; tiles of 32 rows, blocks of 64."""
    case = Latents(((1, 40, 70), (3, 70, 9)), device, dtype, heads=16, rank=512, rope=64, block_size=64)
    case.check()
    assert {work.block for one in case.plans() for work in one.work} == {16, 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_joined(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "part_columns", lambda kv_heads, block: 32)
    case = Latents(((1, 200, 90), (9, 150, 140), (2, 0, 3)), device, dtype)
    assert all(len(work.merges) for one in case.plans() for work in one.work)
    case.check()


def test_a_request_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    together = Latents(MIXED, device, torch.bfloat16)
    whole = together.run()
    for i, (first, last, row, tokens) in enumerate(together.ranges.tolist()):
        alone: Any = Latents(MIXED, device, torch.bfloat16)
        rows = slice(first, last)
        alone.query, alone.query_pe = together.query[rows], together.query_pe[rows]
        alone.slots, alone.positions = together.slots[i : i + 1], together.positions[i : i + 1]
        alone.ranges, alone.seen = np.array([[0, last - first, row, tokens]]), together.seen[rows]
        assert torch.equal(alone.run(), whole[rows])


@pytest.mark.parametrize("fault", ["rotation", "positions", "slots", "blocks", "tokens"])
def test_a_fault_would_show(fault: str, device: torch.device) -> None:
    case = Latents(((3, 70, 40), (5, 33, 60)), device, block_size=16)
    wanted = case.wanted()
    match fault:
        case "rotation":
            case.table = None
        case "positions":
            case.positions = [p + 1 for p in case.positions]
        case "slots":
            case.slots = [s.roll(1) for s in case.slots]
        case "blocks":
            case.block_table = case.block_table.roll(1, 0).contiguous()
        case "tokens":
            case.ranges = case.ranges - np.array([0, 0, 0, 1])
    error = (case.run().double() - wanted).abs().max() / 4
    assert not error < 1000 * TOLERANCE[torch.float32]


@ALL_DTYPES
@pytest.mark.parametrize(("neox", "rotated"), [(True, True), (False, True), (False, False)])
def test_capture_undoes_the_rotation(
    neox: bool, rotated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Latents(((1, 3, 50), (1, 3, 61)), device, dtype, rank=48, neox=neox, rotated=rotated, padding=64)
    rng = torch.Generator().manual_seed(1)
    token = torch.randperm(61, generator=rng)[:37]
    tokens = (case.block_table[1].cpu()[token // 16] * 16 + token % 16).long()
    slots = torch.randperm(90, generator=rng)[:37]
    positions = torch.randint(0, POSITIONS, (37,), generator=rng)
    pool = torch.full((90, 1, 64), float("nan"), dtype=dtype, device=device)
    given = [x.to(device) for x in (tokens, slots, positions)]
    capture_latents_(case.cache, pool, 16, *given, case.table, neox)
    rows = case.cache.cpu()[tokens // 16, tokens % 16]
    captured = pool.cpu()[slots, 0]
    assert torch.equal(captured[:, 16:], rows[:, :48])
    table = None if case.table is None else case.table.cpu()
    wanted = unrotate(rows[:, None, 48:], table, positions, neox)[:, 0]
    torch.testing.assert_close(captured[:, :16], wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    others = torch.ones(90, dtype=torch.bool).index_fill_(0, slots, False)
    assert pool.cpu()[others].isnan().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    assert refuses(512, 64) is None
    assert refuses(640, 64) == "latents of 640: expected a multiple of 16 up to 512"
    assert refuses(512, 24) == "shared keys of 24: expected a multiple of 16 up to 64"
    case = Latents(((2, 5, 4),), device)
    public, _ = case.plans()
    parts = case.pool[:, 0, 16:], case.pool[:, 0, :16]

    def attend(
        query: Any = case.query, parts: Any = parts, table: Any = case.table, plan: Any = public
    ) -> None:
        attend_latents(query, case.query_pe, *parts, table, False, plan, 1.0)

    attend()
    for wrong, says in (
        ({"query": case.query[:, :3]}, "query (2, 3, 32), 1 KV heads: expected [tokens, 4, 32]"),
        ({"query": case.query.bfloat16()}, "expected one dtype of 4 bytes"),
        ({"parts": parts[::-1]}, "latents (15, 16): expected [slots, 32]"),
        ({"parts": (parts[0], parts[1].contiguous())}, "expected equal rows and strides"),
        ({"table": case.table[:, :8]}, "expected [positions, 16], contiguous"),  # type: ignore[index]
        ({"plan": replace(public, kv_heads=2)}, "2 KV heads"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            attend(**wrong)
    with pytest.raises(ValueError, match="expected equal numbers"):
        capture_latents_(case.cache, case.pool, 16, *[torch.zeros(n).long() for n in (1, 2, 1)], None, True)
    with pytest.raises(ValueError, match=r"expected \[blocks, block_size"):
        capture_latents_(case.cache[0], case.pool, 16, *[torch.zeros(1).long()] * 3, None, True)
