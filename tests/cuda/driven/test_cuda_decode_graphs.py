"""Decode passes as CUDA graphs replay them, on the CPU: the launches of one forward pass are recorded once,
then made again over what the buffers hold by then.

FlashAttention is a stand-in; the implementation, the buffers and the Triton kernels are the real ones.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_world import BLOCK, HEADS, KV_HEADS, LIMITS, ROTARY, SIZE, install, stand_in
from full_attention import attend, stream, table_of
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from vllm_hypic.backends.attention.cuda import CUDAAttentionLink, HypicCUDAAttentionImpl
from vllm_hypic.backends.attention.cuda_decode import DecodePlans
from vllm_hypic.backends.ops.span_attention import fixed
from vllm_hypic.backends.ops.span_attention.eager import rotate
from vllm_hypic.backends.ops.span_attention.triton import kernels, merge, operators
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.pool.decoding import Decoding
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, composed_row
from vllm_hypic.pool.tensors import DevicePool

CPU = torch.device("cpu")
ROWS = 6
"""Of the graph; passes have up to so many requests."""
SLOTS = 1600
DTYPE = torch.float32
GEOMETRY = PoolGeometry((AttentionGeometry("layer", KV_HEADS, SIZE, DTYPE),), (), 8, SLOTS // 8, 8)
DEPTH = 40
"""Tokens that a request may have in vLLM's cache."""
ALLOCATES = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
VIEWS = {"transpose", "split", "slice", "t", "view", "expand", "select", "unsqueeze", "alias", "as_strided"}

COLUMNS = torch.arange(1463).split([700, 17, 683, 63])
PLANS = {
    "one": stream(COLUMNS, [0], [3], 9),
    "two": stream(COLUMNS, [1, 3], [2, 5], 7),
    "long": stream(COLUMNS, [2, 0, 3], [1, 2, 4], 6),
    "other": stream(COLUMNS, [2], [4], 5),
}


class World:
    """A layer, its persistent inputs for a graph of :data:`ROWS` rows, and passes over them."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(3)
        self.runtime = HypicRuntime(DevicePool(GEOMETRY, CPU), 0.0)
        self.public = self.runtime.pool.kv["layer"]
        self.public.key.copy_(torch.randn(self.public.key.shape, generator=gen))
        self.public.value.copy_(torch.randn(self.public.value.shape, generator=gen))
        self.table = table_of(2048, ROTARY)
        self.impl = HypicCUDAAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        self.impl.vllm_flash_attn_version = 2
        rope: Any = SimpleNamespace(cos_sin_cache=self.table, is_neox_style=True)
        self.impl.link = CUDAAttentionLink(self.runtime, self.public, rope, operators)
        self.plans = self.runtime.shared.of(DecodePlans)
        self.plans.most = ROWS
        self.plans.made(self.impl.heads(torch.zeros(1, dtype=DTYPE)), CPU)
        blocks = -(-DEPTH // BLOCK)
        self.query = torch.zeros(ROWS, HEADS, SIZE, dtype=DTYPE)
        self.output = torch.zeros_like(self.query)
        self.cache = torch.randn(1 + ROWS * blocks, KV_HEADS, BLOCK, 2 * SIZE, generator=gen).to(DTYPE)
        self.used = torch.zeros(ROWS, dtype=torch.int32)
        self.block_table = 1 + torch.arange(ROWS * blocks, dtype=torch.int32).view(ROWS, blocks)
        self.metadata = FlashAttentionMetadata(
            num_actual_tokens=ROWS,
            max_query_len=1,
            query_start_loc=torch.arange(ROWS + 1, dtype=torch.int32),
            max_seq_len=DEPTH,
            seq_lens=self.used,
            block_table=self.block_table,
            slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        )
        self.gen, self.layer = gen, SimpleNamespace(**{f"_{x}_scale": torch.ones(1) for x in "qkv"})

    def step(self, requests: list[str], computed: list[int]) -> StepContext:
        """The pass of these requests, as the connector's worker half makes it; plain ones have no plan."""
        at = np.array(computed)
        streams = {
            i: (PLANS[r], torch.from_numpy(PLANS[r].slot_mapping), torch.from_numpy(PLANS[r].kv_positions))
            for i, r in enumerate(requests)
            if r in PLANS
        }
        decoding = Decoding.of(requests, streams, at, CPU) or Decoding.nothing(len(requests), CPU)
        return StepContext([], [], CPU, Batch.of(at, np.ones_like(at)), decoding=decoding)

    def enter(self, requests: list[str], computed: list[int]) -> None:
        """All that stock code and ours write before a graph is replayed."""
        step = self.runtime.step = self.step(requests, computed)
        self.query.copy_(torch.randn(self.query.shape, generator=self.gen))
        self.output.fill_(math.nan)
        self.used.zero_()
        self.used[: len(requests)] = torch.tensor(computed) + 1
        self.metadata.query_start_loc[:] = torch.arange(ROWS + 1).clamp(max=len(requests))
        assert self.plans.write(step)

    def forward(self) -> None:
        self.impl.forward(self.layer, self.query, None, None, self.cache, self.metadata, output=self.output)

    def expected(self, requests: list[str]) -> torch.Tensor:
        """Float64: all public columns, rotated, then what is in vLLM's cache."""
        keys, values = (half.double() for half in self.impl.halves(self.cache))
        found = []
        for i, request in enumerate(requests):
            blocks, used = self.block_table[i].long(), int(self.used[i])
            key, value = (t[blocks].flatten(0, 1)[:used] for t in (keys, values))
            if (plan := PLANS.get(request)) is not None:
                slots, at = torch.from_numpy(plan.slot_mapping), torch.from_numpy(plan.kv_positions)
                key = torch.cat([rotate(self.public.key[slots].double(), self.table[at], True), key])
                value = torch.cat([self.public.value[slots].double(), value])
            seen = torch.tensor([len(key)])
            found.append(attend(self.query[i : i + 1], key, value, seen, SIZE**-0.5)[0])
        return torch.cat(found)

    def stock(self) -> torch.Tensor:
        """What the stock implementation makes of the same pass."""
        whole, self.output = self.output, torch.full_like(self.output, math.nan)
        link, self.impl.link = self.impl.link, None
        self.forward()
        self.impl.link, found = link, self.output
        self.output = whole
        return found


class Recording(TorchDispatchMode):
    """The launches of a pass; whatever else computes something is an error, as in a graph it would be lost or
    be of the pass that was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not self.busy:
            assert name in ALLOCATES or name.split(".")[1] in VIEWS, f"{name} beside the launches"
        return func(*args, **(kwargs or {}))

    def launch(self, run: Callable[[], Any]) -> Any:
        self.busy = True
        try:
            return run()
        finally:
            self.busy = False

    def kernel(self, real: Any) -> Any:
        class Launcher:
            def __getitem__(_, grid: Any) -> Callable[..., None]:
                def made(*args: Any, **kwargs: Any) -> None:
                    def run() -> None:
                        real[grid](*args, **kwargs)

                    self.launches.append(run)
                    self.launch(run)

                return made

        return Launcher()

    def flash_attention(self, **given: Any) -> Any:
        first = self.launch(lambda: padded(**given))
        if not given.get("return_softmax_lse"):
            return first

        def again() -> None:
            first[1].copy_(padded(**given)[1])

        self.launches.append(again)
        return first


def padded(**given: Any) -> Any:
    """The stand-in, of the rows that there are: those behind have no tokens, nor anything written."""
    starts = given["cu_seqlens_q"]
    rows = int(starts[-1])
    part = {name: given[name][:rows] for name in ("q", "out", "seqused_k", "block_table")}
    result = stand_in(**{**given, **part, "cu_seqlens_q": starts[: rows + 1]})
    if not given.get("return_softmax_lse"):
        return result
    lse = torch.full((HEADS, ROWS), math.nan)
    lse[:, :rows] = result[1]
    return given["out"], lse


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    recording = Recording()
    with monkeypatch.context() as patch:
        for module, name in (
            (kernels, "span_attention_kernel"),
            (kernels, "merge_parts_kernel"),
            (merge, "merge_kernel"),
        ):
            patch.setattr(module, name, recording.kernel(getattr(module, name)))
        patch.setattr(flash_attn, "flash_attn_varlen_func", recording.flash_attention)
        with recording:
            yield recording


@pytest.fixture(autouse=True)
def _stock(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, padded)
    # Few columns, so that the interpreter is through soon with the programs that find nothing to do.
    monkeypatch.setattr(fixed, "LEAST_COLUMNS", 2048)
    monkeypatch.setattr(fixed, "COLUMNS_A_ROW", 512)


PASSES = [
    (["plain", "one", "plain2", "long", "two"], [20, 9, 3, 30, 8]),
    (["plain", "one", "plain2", "long", "two"], [21, 10, 4, 31, 9]),
    (["two", "other", "plain"], [16, 11, 2]),
    (["plain", "plain2"], [5, 6]),
    (["plain", "plain2", "two", "other", "one", "plain3"], [5, 6, 31, 32, 33, 1]),
    (["long"], [15]),
]


def captured(world: World, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """The graph, made as at start-up: of a pass in which nothing is composed."""
    world.enter(["plain"] * ROWS, [0] * ROWS)
    with recorded(monkeypatch) as recording:
        world.forward()
    assert len(recording.launches) == 4  # FlashAttention, span attention, its parts, the merge
    return recording


def test_one_recording_serves_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests, elsewhere in the batch, with one part or several; some plain, some rows padding."""
    world = World()
    recording = captured(world, monkeypatch)
    for requests, computed in PASSES:
        world.enter(requests, computed)
        for launch in recording.launches:
            launch()
        count = len(requests)
        error = (world.output[:count].double() - world.expected(requests)).abs().max()
        assert error < LIMITS[DTYPE], (requests, error)
        assert world.output[count:].isnan().all(), "padding was written"
        plain = [i for i, r in enumerate(requests) if r not in PLANS]
        composed = [i for i, r in enumerate(requests) if r in PLANS]
        stock = world.stock()
        assert torch.equal(world.output[plain], stock[plain])
        assert not torch.isclose(world.output[composed], stock[composed]).all(dim=(1, 2)).any()


def test_a_graph_and_a_pass_without_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buffers of fixed shapes and through plans made for the pass."""
    world = World()
    requests, computed = PASSES[0]
    world.enter(requests, computed)
    world.forward()
    found = world.output.clone()
    step = world.runtime.step
    assert step is not None and step.decoding is not None
    monkeypatch.setattr(DecodePlans, "fit", lambda *_: False)
    composed = [
        composed_row(BatchRow(i, i, i + 1, at, at + 1), StreamTensors.of(PLANS[request], CPU))
        for i, (request, at) in enumerate(zip(requests, computed, strict=True))
        if request in PLANS
    ]
    world.runtime.step = StepContext(composed, [], CPU, step.batch)
    world.output.fill_(math.nan)
    world.forward()
    assert torch.equal(world.output[: len(requests)], found[: len(requests)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["contents", "rows", "columns"])
def test_a_fault_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    recording = captured(world, monkeypatch)
    world.enter(*PASSES[0])
    plan = world.plans.made(world.impl.heads(world.query), CPU)
    requests, computed = PASSES[2]
    match fault:
        case "contents":  # those of the pass before
            monkeypatch.setattr(fixed.FixedPlans, "write", lambda *_: None)
        case "rows":  # the neighbour's
            real = fixed.FixedPlans.write
            monkeypatch.setattr(
                fixed.FixedPlans, "write", lambda self, rows, *of: real(self, (rows + 1) % ROWS, *of)
            )
    world.enter(requests, computed)
    if fault == "columns":
        plan.plan(ROWS).columns.slots.zero_()
    for launch in recording.launches:
        launch()
    error = (world.output[: len(requests)].double() - world.expected(requests)).abs().max()
    assert not error < 100 * LIMITS[DTYPE]


def test_a_pass_without_room_is_not_written() -> None:
    world = World()
    assert not world.plans.write(world.step(["plain"] * (ROWS + 1), [0] * (ROWS + 1)))
    wide = world.step(["long", "one"], [20, 20])
    assert wide.decoding is not None and wide.decoding.columns > fixed.most_columns(2)
    assert not world.plans.write(wide)
    assert world.plans.write(world.step(["long", "two"], [20, 20]))


def host_calls(work: Callable[[], object]) -> int:
    """Python functions and functions of C that are called."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_pass(requests: int) -> int:
    """The number of Python calls in a pass that decodes ``requests``, from connector to buffers."""
    side = WorkerConnector(GEOMETRY, HypicConfig())
    plans = side.start(CPU).shared.of(DecodePlans)
    plans.most = 64
    plans.made((HEADS, KV_HEADS, SIZE, DTYPE), CPU)
    names, once = [f"r{i}" for i in range(requests)], np.ones(requests, dtype=np.int32)
    computed = np.full(requests, 8)

    def one_pass(metadata: HypicMetadata) -> None:
        step = side.begin_step(metadata, names, computed, once)
        assert step is not None and side.runtime.shared.of(DecodePlans).write(step)
        computed[:] += 1

    one_pass(HypicMetadata(streams=dict.fromkeys(names, PLANS["two"])))
    later = [HypicMetadata() for _ in range(3)]
    first, *others = [host_calls(lambda m=m: one_pass(m)) for m in later]
    assert others == [first] * 2
    return first


def test_host_work_of_unchanged_requests_does_not_grow_with_them() -> None:
    assert (found := calls_of_a_pass(1)) == calls_of_a_pass(64) < 100, found
