"""Rows with a window of their own in Triton, over the pool and over vLLM's cache, and log-sum-exps of that,
against float64."""

import pytest
import torch
from backends.cases import LSE_TOLERANCE, TOLERANCE
from span_cases import FP8, SCALES, Case, over, skip_without_fp8

from vllm_hypic.backends.ops.span_attention import reference
from vllm_hypic.backends.ops.span_attention.triton import operators

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("short_parts")
WINDOWS = [*((window, torch.float32) for window in (1, 5, 64, 1000)), (5, torch.float16), (64, BF16)]


@pytest.mark.parametrize(("window", "dtype"), WINDOWS)
@pytest.mark.parametrize(("group", "size"), [(1, 32), (3, 72)])
def test_public_columns(window: int, group: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Windows that begin anywhere, also behind all that a row sees; columns before all windows of a request
    are poisoned."""
    requests = [(2, 300), (25, 300), (1, 70), (3, 0), (40, 65)]
    case = Case(*requests, heads=2 * group, size=size, dtype=dtype, device=device, seed=window)
    rng = torch.Generator().manual_seed(window)
    behind = torch.randint(0, 9, case.visible_kv_lens.shape, generator=rng)
    case.hidden_kv_lens = (case.visible_kv_lens - window + behind).clamp(min=0)
    wanted, at = case.wanted(), 0
    for (rows, _), slots in zip(requests, case.slots, strict=True):
        hidden, seen = (t[at : at + rows] for t in (case.hidden_kv_lens, case.visible_kv_lens))
        at += rows
        lowest = min([*hidden[hidden < seen].tolist(), len(slots)])
        case.key[slots[:lowest]] = case.value[slots[:lowest]] = float("nan")
    case.compare(*case.run(), wanted)


def test_hiding_nothing_changes_no_bit(device: torch.device) -> None:
    case = Case((1, 200), (20, 150), dtype=torch.bfloat16, device=device)
    plain = case.run()
    case.hidden_kv_lens = torch.zeros_like(case.visible_kv_lens)
    assert all(torch.equal(a, b) for a, b in zip(plain, case.run(), strict=True))


@pytest.mark.parametrize("by_token", [True, False], ids=["NHD", "HND"])
@pytest.mark.parametrize(("window", "dtype"), [*WINDOWS, (30, FP8)])
@pytest.mark.parametrize(("group", "size", "block"), [(1, 32, 16), (3, 72, 24)])
def test_cached_tokens(
    window: int, group: int, size: int, block: int, dtype: torch.dtype, by_token: bool, device: torch.device
) -> None:
    """In both layouts of vLLM's cache; blocks that lie behind all windows are given away: the table names
    another one.  That one, tokens that are not there yet and blocks of nobody are poisoned."""
    rng, kv_heads, nan = torch.Generator().manual_seed(window), 2, float("nan")
    scales = SCALES if dtype == FP8 else {}
    if scales:
        skip_without_fp8(device)
        dtype = BF16

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=rng).to(dtype)

    lengths = [(1, 1), (1, 140), (7, 7), (5, 33), (40, 80)]
    blocks = [-(-tokens // block) for _, tokens in lengths]
    order = (torch.randperm(sum(blocks), generator=rng) + 1).int()
    table = torch.zeros(len(lengths) + 1, max(blocks), dtype=torch.int32)
    cache = torch.full((len(order) + 1, kv_heads, block, 2 * size), nan, dtype=dtype)
    query_ranges, hidden, at = [], [], 2
    for i, (rows, tokens) in enumerate(lengths):
        mine, order = order[: blocks[i]], order[blocks[i] :]
        own = torch.arange(tokens - rows, tokens)
        # Distances are not those in the cache: the window loses tokens in jumps.
        jumps = torch.randint(0, 3, (rows,), generator=rng).cumsum(0)
        begins = torch.minimum((own - window + 1).clamp(min=0) + jumps, own)
        gone = int(begins.min()) // block
        table[i + 1, gone : len(mine)] = mine[gone:]
        for t in range(int(begins.min()), tokens):
            cache[mine[t // block], :, t % block] = normal(kv_heads, 2 * size)
        query_ranges.append((at, at + rows, i + 1, tokens))
        hidden.append(begins)
        at += rows + 1
    query = torch.full((at, group * kv_heads, size), nan, dtype=dtype)
    for first, last, _, _ in query_ranges:
        query[first:last] = normal(last - first, group * kv_heads, size)
    ranges, begins, scale = torch.tensor(query_ranges), torch.cat(hidden), size**-0.5

    cached = cache
    if scales:  # of the query's dtype, that of its results, K and V are not
        halves = zip(cache.split(size, dim=-1), scales.values(), strict=True)
        cached = torch.cat([over(half, by).view(torch.uint8) for half, by in halves], -1).view(FP8)
        halves = zip(cached.split(size, dim=-1), scales.values(), strict=True)
        cache = torch.cat([half.double() * by for half, by in halves], -1)
    index = torch.arange(cache[0].numel()).view(cache.shape[1:]).transpose(0, 1).split(size, dim=-1)
    wanted, wanted_lse = reference.cache_attention(query, cache, *index, table, ranges, scale, begins)
    laid = cached.transpose(1, 2).contiguous() if by_token else cached.transpose(1, 2)
    halves = laid.to(device).split(size, dim=-1)
    out, lse = operators.cached_attention(
        query.to(device), *halves, table.to(device), ranges, scale, begins.to(device), *scales.values()
    )
    assert out.dtype == lse.dtype == torch.float32
    largest = float(cache.nan_to_num(0.0).abs().max())
    assert float((out.cpu().double() - wanted).abs().max()) / largest <= TOLERANCE[dtype]
    assert float((lse.cpu() - wanted_lse).abs().max()) <= (1e-2 if scales else LSE_TOLERANCE[dtype])


def test_bad_arguments_are_refused(device: torch.device) -> None:
    case = Case((1, 70), device=device)
    case.hidden_kv_lens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="hidden_kv_lens: 2 numbers for 1 rows"):
        case.run()
    table, ranges = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.tensor([[3, 4, 0, 1]])
    caches = [torch.zeros(n, 16, 2, 64, device=device) for n in (2, 2)]
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"pool_value .* expected \[blocks, block_size, 2, 64\]"):
        operators.cached_attention(case.query, caches[0], caches[1][0], table, ranges, 1.0, nothing)
    wide = torch.zeros(2, 32, 2, 64, device=device)[:, ::2]
    with pytest.raises(ValueError, match="equal strides between tokens"):
        operators.cached_attention(case.query, caches[0], wide, table, ranges, 1.0, nothing)
