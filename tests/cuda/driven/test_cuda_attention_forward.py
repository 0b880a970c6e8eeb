"""The CUDA attention implementation's forward pass, on the CPU: what it hands to whom, and what comes out.

FlashAttention alone is a stand-in, computed in float64; the implementation, its plans and its Triton
operators are the real ones.  A batch of plain rows, composed rows and captured rows must give full attention.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_attention import attend, stream, table_of
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from vllm_hypic.backends.attention import cuda_rows as shared_rows
from vllm_hypic.backends.attention.cuda import CUDAAttentionLink, HypicCUDAAttentionImpl
from vllm_hypic.backends.attention.cuda_fp8 import Scales
from vllm_hypic.backends.ops.kept_lse import KEPT
from vllm_hypic.backends.ops.span_attention.plan import causal_kv_lens
from vllm_hypic.backends.ops.span_attention.torch import rotate, unrotate
from vllm_hypic.backends.ops.span_attention.triton import operators
from vllm_hypic.patches import cuda_kept_lse
from vllm_hypic.pool.geometry import FP8, AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.step import (
    AttentionRows,
    Batch,
    BatchRow,
    StepContext,
    StreamTensors,
    capture_row,
    composed_row,
)
from vllm_hypic.pool.tensors import DevicePool, quantised

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, ROTARY = 4, 2, 32, 16
BLOCK = 16
SLOTS = 64
"""Token slots of the pool."""
SCALES = 0.03, 0.02, 0.025
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error allowed, in units of V, which is about 1."""


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    window_size: list[int] | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> Any:
    """``flash_attn_varlen_func`` over a paged cache, in float64; lengths that it is told must fit."""
    left, right = (-1, -1) if window_size is None else window_size
    assert causal and right == (-1 if left == -1 else 0)
    assert not others.get("softcap")
    assert k.dtype != FP8 or others["fa_version"] == 3
    # The 4th leaves no log-sum-exp unless it is another kernel, which nobody asks it for.
    assert others["fa_version"] in (2, 3) or not return_softmax_lse
    # Nothing here relies on whether a log-sum-exp has sinks in it.
    assert s_aux is None or not return_softmax_lse
    starts, used = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(block_table) == len(used) == len(starts) - 1 and starts[-1] == len(q)
    assert max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
    assert max_seqlen_k >= max(used)
    kind = q.dtype
    if k.dtype == FP8:
        assert q.dtype == v.dtype == FP8
        descales: list[Any] = [others[f"{x}_descale"] for x in "qkv"]
        assert {scale.shape for scale in descales} == {(len(used), k.shape[2])}
        kind = torch.bfloat16
        q, k, v = (x.double() * scale[0, 0] for x, scale in zip((q, k, v), descales, strict=True))
    result = torch.empty(q.shape, dtype=kind) if out is None else out
    lse = torch.empty(q.shape[1], len(q))
    for i, tokens in enumerate(used):
        blocks = block_table[i, : -(-tokens // k.shape[1])].long()
        key, value = (t[blocks].flatten(0, 1)[:tokens] for t in (k, v))
        rows = slice(starts[i], starts[i + 1])
        seen = torch.arange(tokens - (rows.stop - rows.start), tokens) + 1
        hidden = (seen - 1 - left).clamp(min=0) if left >= 0 else torch.zeros_like(seen)
        key, value, first = key[hidden.min() :], value[hidden.min() :], hidden.min()
        result[rows], lse[:, rows] = attend(
            q[rows], key, value, seen - first, softmax_scale, hidden - first, s_aux
        )
    return (result, lse) if return_softmax_lse else result


@dataclass
class World:
    """One attention layer and a batch: a plain decode, a composed prefill, a segment request, a composed
    decode, a composed request that sees nothing yet, and poisoned padding.

    With a ``window`` the layer has one, vLLM has given away the blocks behind it, and the segment request has
    padding inside.  ``drafts``: rows that the requests that decode have beside their first.  ``scales``: the
    query, K and V of the cache, and records are FP8 and count times these.
    """

    dtype: torch.dtype
    table: torch.Tensor | None
    neox: bool = True
    window: int | None = None
    sinks: bool = False
    drafts: int = 0
    scales: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(7)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=gen).to(self.dtype)

        geometry = PoolGeometry(
            (AttentionGeometry("layer", KV_HEADS, SIZE, FP8 if self.scales else self.dtype),),
            (),
            page_tokens=8,
            pages=SLOTS // 8,
            slots=8,
        )
        self.pool = DevicePool(geometry, CPU)
        of_query, *of_records = self.scales or (1.0, 1.0, 1.0)
        self.pool.scale("layer", *of_records)
        self.public = self.pool.kv["layer"]
        self.public.key.fill_(math.nan), self.public.value.fill_(math.nan)
        self.runtime = HypicRuntime(self.pool, 0.0)

        # Two records, their columns scattered over the pool.
        places = torch.randperm(SLOTS, generator=gen)
        self.columns = places[:19], places[19:30]
        for slots in self.columns:
            key, value = normal(len(slots), KV_HEADS, SIZE), normal(len(slots), KV_HEADS, SIZE)
            self.public.write(slots, key, value)
        self.capture_slots = places[30:36].numpy()

        self.prefill = stream(self.columns, [0, 1], [3, 5], 9)
        self.decode, self.blind = stream(self.columns, [1], [2], 3), stream(self.columns, [0], [4], 6)
        padded = None if self.window is None else np.array([0, 1, 2, 3, 10, 11, 12, 13, 14])
        capture = CapturePlan(2, 8, 0, self.capture_slots, padded, leading=False)
        # (tokens behind it, tokens in this pass)
        self.lengths = [(20, 1 + self.drafts), (2, 7), (3, 6), (17, 1 + self.drafts), (0, 4)]
        computed, scheduled = (np.array(part) for part in zip(*self.lengths, strict=True))
        self.starts = [0, *np.cumsum(scheduled).tolist()]
        rows = [
            BatchRow(i, self.starts[i], self.starts[i + 1], s0, s0 + n)
            for i, (s0, n) in enumerate(self.lengths)
        ]
        composed = [
            composed_row(rows[i], StreamTensors.of(plan, CPU))
            for i, plan in ((1, self.prefill), (3, self.decode), (4, self.blind))
        ]
        self.step = StepContext(
            composed, [capture_row("segment", rows[2], capture)], CPU, Batch.of(computed, scheduled)
        )
        self.runtime.step = self.step
        self.capture_positions = torch.arange(
            3, 8
        )  # tokens 3 to 8 of it are of its interior and in this pass

        tokens = self.starts[-1]
        self.query = torch.full((tokens + 3, HEADS, SIZE), math.nan, dtype=self.dtype)
        self.query[:tokens] = normal(tokens, HEADS, SIZE)
        self.key = torch.full((tokens + 3, KV_HEADS, SIZE), math.nan, dtype=self.dtype)
        self.value = self.key.clone()
        self.key[:tokens], self.value[:tokens] = (normal(tokens, KV_HEADS, SIZE) for _ in "kv")

        # vLLM's cache; K of the private stream is rotated by whoever put it there.
        used = [s0 + n for s0, n in self.lengths]
        blocks = [-(-n // BLOCK) for n in used]
        order = torch.randperm(sum(blocks), generator=gen) + 1
        self.table_of_blocks = torch.zeros(len(used), max(blocks), dtype=torch.int32)
        self.cache = torch.full((sum(blocks) + 1, KV_HEADS, BLOCK, 2 * SIZE), math.nan, dtype=self.dtype)
        self.private: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, (s0, n) in enumerate(self.lengths):
            mine = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
            self.table_of_blocks[i, : len(mine)] = mine
            key, value = normal(s0 + n, KV_HEADS, SIZE), normal(s0 + n, KV_HEADS, SIZE)
            key[s0:], value[s0:] = (t[self.starts[i] : self.starts[i + 1]] for t in (self.key, self.value))
            self.private.append((key, value))
            gone = 0 if self.window is None else max(0, s0 + 1 - self.window) // BLOCK
            self.table_of_blocks[i, :gone] = 0
            for t in range(gone * BLOCK, s0 + n):
                row = self.cache[mine[t // BLOCK], :, t % BLOCK]
                row[:, :SIZE], row[:, SIZE:] = key[t], value[t]
        self.metadata = FlashAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=int(scheduled.max()),
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            max_seq_len=max(used),
            seq_lens=torch.tensor(used, dtype=torch.int32),
            block_table=self.table_of_blocks,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        )
        self.impl = HypicCUDAAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, self.window, "auto")
        self.impl.vllm_flash_attn_version = 2
        tensors = [torch.tensor(x) for x in (of_query, *of_records)]
        self.layer = SimpleNamespace(
            kv_cache=self.cache,
            dtype=self.dtype,
            **{f"_{x}_scale": one for x, one in zip("qkv", tensors, strict=True)},
            **{f"_{x}_scale_float": one.item() for x, one in zip("qkv", tensors, strict=True)},
        )
        if self.scales:
            self._quantise()
        if self.sinks:
            # About as large as the sum over the columns of some rows.
            self.impl.sinks = torch.linspace(0, 3, HEADS).to(self.dtype)
        rope: Any = None
        if self.table is not None:
            rope = SimpleNamespace(cos_sin_cache=self.table, is_neox_style=self.neox)
        scales = Scales.of(self.layer) if self.scales else None
        self.impl.link = CUDAAttentionLink(self.runtime, self.public, rope, operators, scales)

    def _quantise(self) -> None:
        """What vLLM has quantised before attention runs; what is expected is of the same numbers."""
        assert self.scales is not None
        of_query, of_key, of_value = self.scales
        self.impl.kv_cache_dtype, self.impl.vllm_flash_attn_version = "fp8", 3
        bytes_of = torch.empty(self.cache.shape, dtype=FP8)
        bytes_of[..., :SIZE] = quantised(self.cache[..., :SIZE], of_key)
        bytes_of[..., SIZE:] = quantised(self.cache[..., SIZE:], of_value)
        self.cache = self.layer.kv_cache = bytes_of.view(torch.uint8)
        self.query = quantised(self.query, of_query)
        self.private = [
            (quantised(key, of_key).double() * of_key, quantised(value, of_value).double() * of_value)
            for key, value in self.private
        ]

    def forward(self) -> torch.Tensor:
        """The rows that count."""
        output = torch.full(self.query.shape, math.nan, dtype=self.dtype)
        self.impl.forward(
            self.layer, self.query, self.key, self.value, self.cache, self.metadata, output=output
        )
        assert output[self.starts[-1] :].isnan().all(), "padding was written"
        return output[: self.starts[-1]]

    def expected(self) -> torch.Tensor:
        """Full attention of every row, in float64; windows are measured in the prompt."""
        parts = []
        composed = {c.row.index: c.stream.plan for c in self.step.composed}
        padded = {c.row.index: c.plan.positions for c in self.step.captures}
        for i, (s0, n) in enumerate(self.lengths):
            private_key, private_value = (t.double() for t in self.private[i])
            positions = padded.get(i)
            if i in composed:
                positions = composed[i].logical(0, s0 + n)
            if positions is None:
                positions = np.arange(s0 + n)
            rows = range(self.starts[i], self.starts[i + 1])
            for r, row in enumerate(rows):
                key, value = private_key[: s0 + r + 1], private_value[: s0 + r + 1]
                at = torch.from_numpy(positions[: s0 + r + 1])
                if i in composed:
                    plan = composed[i]
                    seen = int(plan.visible_kv_lens(s0 + r, s0 + r + 1)[0])
                    slots = torch.from_numpy(plan.slot_mapping[:seen])
                    columns = torch.from_numpy(plan.kv_positions[:seen])
                    rotation = None if self.table is None else self.table[columns]
                    public_key = self.public.key[slots].double() * self.public.key_scale
                    public_value = self.public.value[slots].double() * self.public.value_scale
                    key = torch.cat([rotate(public_key, rotation, self.neox).double(), key])
                    value = torch.cat([public_value, value])
                    at = torch.cat([columns, at])
                if self.window is not None:
                    near = at > positions[s0 + r] - self.window
                    key, value = key[near], value[near]
                query = self.query[row : row + 1].double() * (self.scales or (1.0,))[0]
                given = query, key, value, torch.tensor([len(key)]), SIZE**-0.5
                out, _ = attend(*given, sinks=self.impl.sinks)
                parts.append(out)
        return torch.cat(parts)


def angles(positions: int) -> torch.Tensor:
    return table_of(positions, ROTARY)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashAttention is the stand-in; of each call whether its log-sum-exp was asked for."""
    monkeypatch.setattr(
        flash_attn.FA4DenseAttentionKernel, "__call__", flash_attn.FA4DenseAttentionKernel.__call__
    )
    cuda_kept_lse.apply()
    calls = list[bool]()

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(bool(kwargs.get("return_softmax_lse")))
        return stand_in(*args, **kwargs)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", called, raising=False)
    return calls


@pytest.mark.parametrize(
    ("dtype", "table", "neox"),
    [
        (torch.float32, True, True),
        (torch.float32, True, False),
        (torch.float32, False, True),
        (torch.bfloat16, True, True),
    ],
)
def test_a_mixed_batch_gets_full_attention(dtype: torch.dtype, table: bool, neox: bool) -> None:
    world = World(dtype, angles(128) if table else None, neox)
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[dtype], error


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("window", [None, 3, 20, 30, 64])
def test_fp8_counts_times_its_scales(window: int | None, drafts: int) -> None:
    world = World(torch.bfloat16, angles(128), window=window, drafts=drafts, sinks=True, scales=SCALES)
    expected = world.expected()
    error = (world.forward().double() - expected).abs().max()
    assert error < LIMITS[torch.bfloat16], error
    for scale in range(3):
        wrong = [*SCALES]
        wrong[scale] *= 1.3
        other = World(torch.bfloat16, angles(128), window=window, drafts=drafts, sinks=True, scales=SCALES)
        link: Any = other.impl.link
        of_layer = replace(link.scales, query=wrong[0], key=wrong[1], value=wrong[2])
        of_records = replace(link.public, key_scale=wrong[1], value_scale=wrong[2])
        other.impl.link = replace(link, scales=of_layer, public=of_records)
        assert not (other.forward().double() - expected).abs().max() < 2 * LIMITS[torch.bfloat16]


def test_what_is_captured_is_fp8() -> None:
    world = World(torch.bfloat16, angles(128), scales=SCALES)
    world.forward()
    rows, slots = world.step.captured.rows, world.step.captured.slots  # type: ignore[union-attr]
    key = unrotate(world.key[rows], world.table, world.step.captured.positions, True)  # type: ignore[union-attr]
    for found, given, scale in (
        (world.public.key, key, SCALES[1]),
        (world.public.value, world.value[rows], SCALES[2]),
    ):
        error = (found[slots].float() * scale - given.float()).abs() / given.float().abs().clamp(min=scale)
        assert error.max() <= 2**-4 + 2**-8, error.max()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        *((window, torch.float32) for window in (1, 3, 12, 20, 30, 64)),
        (20, torch.bfloat16),
    ],
)
def test_windows_are_measured_in_the_prompt(window: int, dtype: torch.dtype, sinks: bool) -> None:
    """Windows that hide all that is public, some of it from both composed requests, from one, from none."""
    world = World(dtype, angles(128), window=window, sinks=sinks)
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[dtype], error
    rows = world.step.attention_rows(window, 0)
    assert (rows.merged is None, rows.replaced is None) == (window < 30, window == 64)


def test_where_all_rows_are_replaced_stock_does_not_run() -> None:
    world = World(torch.float32, angles(128), window=3, sinks=True)
    expected = world.expected()
    far = world.step.attention_rows(3, 0).replaced
    assert far is not None and 0 not in far.rows
    # A batch that has no other rows: that of the plain request is left out.
    world.step = replace(world.step, batch=Batch([0, len(far.rows)], [0]), _attention_rows={})
    world.runtime.step = world.step
    output = world.forward()
    assert output[0].isnan().all()
    error = (output.double() - expected)[far.rows].abs().max()
    assert error < LIMITS[torch.float32], error


@pytest.mark.parametrize("window", [None, 20], ids=["", "window"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_are_attended_to_by_those_behind_them_alone(drafts: int, window: int | None) -> None:
    """What the first row of a composed request that decodes sees does not depend on its drafts."""
    world = World(torch.float32, angles(128), window=window, drafts=drafts)
    found = world.forward()
    error = (found.double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error
    first = world.starts[3]
    world.private[3][0][18:].add_(1)
    assert (found.double() - world.expected())[first].abs().max() < LIMITS[torch.float32]
    assert (found.double() - world.expected())[first + 1].abs().max() > 10 * LIMITS[torch.float32]


def test_sinks_without_a_window() -> None:
    world = World(torch.float32, angles(128), sinks=True)
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error


def test_pieces_of_windowed_rows_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "PARTIAL_BYTES", -1)
    monkeypatch.setattr(shared_rows, "SHORTEST", 1)
    world = World(torch.float32, angles(128), window=20, sinks=True)
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error


@pytest.mark.parametrize("fault", ["distances in the stream", "sinks forgotten", "sinks counted twice"])
def test_a_fault_of_windows_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(torch.float32, angles(128), window=20, sinks=True)
    expected = world.expected()
    match fault:
        case "distances in the stream":
            far = world.step.attention_rows(20, 0).replaced
            assert far is not None
            own = torch.from_numpy(causal_kv_lens(far.public.cache_ranges.numpy())) - 1
            nothing = torch.zeros_like(own)
            far = replace(far, hidden_columns=nothing, hidden_tokens=(own - 19).clamp(min=0))
            monkeypatch.setattr(
                StepContext, "attention_rows", lambda *_: AttentionRows(None, far, all_replaced=False)
            )
        case "sinks forgotten":
            world.impl.sinks = None
        case "sinks counted twice":
            assert world.impl.sinks is not None
            world.impl.sinks = world.impl.sinks + math.log(2)
    error = (world.forward().double() - expected).abs().max()
    assert error > 1000 * LIMITS[torch.float32], error


def test_pieces_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every row, across requests."""
    monkeypatch.setattr(shared_rows, "PARTIAL_BYTES", -1)
    monkeypatch.setattr(shared_rows, "SHORTEST", 1)
    world = World(torch.float32, angles(128))
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error
    public = world.step.attention_rows(None, 0).merged
    assert public is not None
    pieces = shared_rows.span_pieces(world.runtime, world.step, public, world.impl.heads(world.query))
    assert len(pieces) == 8


def test_plain_rows_keep_the_bits_of_the_stock_implementation() -> None:
    world = World(torch.bfloat16, angles(128))
    ours = world.forward()
    world.impl.link = None
    stock = world.forward()
    plain = [0, *range(world.starts[2], world.starts[3]), *range(world.starts[4], world.starts[5])]
    assert torch.equal(ours[plain], stock[plain])
    composed = [*range(world.starts[1] + 1, world.starts[2]), world.starts[3]]
    assert not torch.isclose(ours[composed], stock[composed]).all(dim=(1, 2)).any(), "nothing was composed"


@pytest.mark.parametrize("drafts", [0, 2])
def test_flash_attention_is_called_once(asked: list[bool], drafts: int) -> None:
    """The stock call leaves its log-sum-exp; in passes of plain rows it is not asked for."""
    world = World(torch.float32, angles(128), drafts=drafts)
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error
    assert asked == [True]
    world.runtime.step = None
    world.forward()
    assert asked == [True, False]
    assert KEPT.lse is None and not KEPT.wanted


@pytest.mark.parametrize(("sinks", "version"), [(True, 2), (False, 4)], ids=["sinks", "4"])
def test_a_log_sum_exp_that_stock_does_not_leave_is_asked_for_again(
    asked: list[bool], sinks: bool, version: int
) -> None:
    """FlashAttention 4 has none unless asked, and with sinks it is not known whether they are in it."""
    world = World(torch.float32, angles(128), sinks=sinks)
    assert world.impl.keeps_lse is not sinks
    world.impl.vllm_flash_attn_version = version
    assert not world.impl.keeps_lse
    error = (world.forward().double() - world.expected()).abs().max()
    assert error < LIMITS[torch.float32], error
    assert asked == [False, True]


def test_what_is_kept_is_the_threads_own() -> None:
    """Another thread's stock call does not see that this one asks."""
    with ThreadPoolExecutor(1) as other:
        KEPT.wanted = True
        try:
            assert not other.submit(lambda: KEPT.wanted).result()
        finally:
            KEPT.wanted = False


def test_interiors_are_captured_unrotated() -> None:
    world = World(torch.float32, angles(128))
    raw = torch.randn(5, KV_HEADS, SIZE)
    rows = slice(world.starts[2], world.starts[2] + 5)
    assert world.table is not None
    world.key[rows] = rotate(raw, world.table[world.capture_positions], True)
    world.forward()
    slots = torch.from_numpy(world.capture_slots)[1:6]
    torch.testing.assert_close(world.public.key[slots], raw, atol=1e-5, rtol=1e-5)
    assert torch.equal(world.public.value[slots], world.value[rows])
    used = torch.cat([*world.columns, slots])
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, used, False)
    assert world.public.key[others].isnan().all(), "slots of nobody were written"
    assert world.runtime.calls == {"capture_kv": 1, "span_attention": 1}


@pytest.mark.parametrize("fault", ["tokens", "rows", "blocks", "positions", "visible_kv_lens"])
def test_a_fault_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is larger than what is tolerated."""
    world = World(torch.float32, angles(128))
    expected = world.expected()
    match fault:
        case "tokens":  # FlashAttention told of one token too few, when it is called again
            public = world.step.attention_rows(None, 0).merged
            assert public is not None
            public.cache_ranges[:, 3] -= 1
            monkeypatch.setattr(HypicCUDAAttentionImpl, "keeps_lse", False)
        case "rows":  # the log-sum-exp of the row before
            stock = flash_attn.flash_attn_varlen_func

            def rolled(**given: Any) -> Any:
                out, lse = stock(**given)
                return out, lse.roll(1, 1)

            monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", rolled)
        case "blocks":  # the wrong request's blocks
            metadata = world.metadata
            world.metadata = replace(metadata, block_table=metadata.block_table.roll(1, 0).contiguous())
            world.metadata.seq_lens.fill_(BLOCK)
        case "positions":  # public K rotated as if it stood elsewhere
            for composed in world.step.composed:
                composed.stream.kv_positions += 1
        case "visible_kv_lens":
            for composed in world.step.composed:
                composed.visible_kv_lens.clamp_(max=max(0, int(composed.visible_kv_lens.max()) - 1))
    try:
        error = (world.forward().double() - expected).abs().max()
    except AssertionError:
        return
    assert not error < 10 * LIMITS[torch.float32]


def test_plans_are_made_once_a_pass_and_columns_once_for_the_same_requests() -> None:
    world = World(torch.float32, None)
    world.forward()
    plans = world.step.shared.of(shared_rows._SharedPlans)
    first = made_in(plans)
    world.forward()
    again = made_in(plans)
    assert len(first) == len(again) == 2 and all(a is b for a, b in zip(first, again, strict=True))
    assert world.step.shared.of(shared_rows._SharedPlans) is plans
    kept = world.runtime.shared.of(shared_rows._KeptColumns).kept
    [(_, columns)] = kept.values()
    world.runtime.step = StepContext(world.step.composed, [], CPU, world.step.batch)
    world.forward()
    assert [made for _, made in kept.values()] == [columns]
    world.runtime.step = StepContext(world.step.composed[:1], [], CPU, world.step.batch)
    world.forward()
    [(_, other)] = kept.values()
    assert other is not columns


def made_in(plans: shared_rows._SharedPlans) -> list[Any]:
    """All that was made once for the pass."""
    return [made for _, made in plans._made.values()]
