"""The CUDA gated delta net's core, on the CPU: which rows go where, and what comes out.

Stock vLLM's core alone is a stand-in, which believes the metadata that it is given; layer, layout, plans and
Triton operators are the real ones.  Outputs, caches and records of a mixed batch must be those of float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.gated_delta import Caches, Inputs, Weights, reference
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, pack
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.pool.transition_blocks import TransitionBlocks

CPU = torch.device("cpu")
KEY_HEADS, HEADS, K, V, TAPS = 1, 2, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * K + HEADS * V
NAME = "model.layers.0.linear_attn"
BLOCK = 8
"""Tokens of a KV block: where stock code takes over again."""
LIMIT = 2e-5
"""Largest error of outputs and states, which are about 1; everything is computed in float32."""


def weights_of(layer: Any) -> Weights:
    """Stock's constants, with the epsilon of vLLM's CUDA kernels."""
    return Weights.prepare(
        layer.conv1d.weight.view(CHANNELS, TAPS), None, layer.A_log, layer.dt_bias, KEY_HEADS, 1e-6
    )


def stock_core(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """What vLLM computes for the batch that the metadata describes, and checks of that description."""
    m: GDNAttentionMetadata = get_forward_context().attn_metadata[NAME]
    tokens, requests, decodes = m.num_actual_tokens, m.num_decodes + m.num_prefills, m.num_decodes
    starts, slots = m.non_spec_query_start_loc, m.non_spec_state_indices_tensor
    assert starts is not None and slots is not None
    assert starts.dtype == slots.dtype == torch.int32
    assert len(starts) == requests + 1 and len(slots) == requests
    bounds = starts.tolist()
    assert bounds[-1] == tokens == m.num_decode_tokens + m.num_prefill_tokens == len(mixed_qkv)
    assert bounds[decodes] == m.num_decode_tokens == decodes
    resumed = [True] * requests
    if m.num_prefills:
        assert m.has_initial_state is not None and m.prefill_has_initial_state is not None
        resumed = m.has_initial_state.tolist()
        assert m.prefill_has_initial_state.tolist() == resumed[decodes:]
        assert m.prefill_query_start_loc is not None and m.prefill_state_indices is not None
        assert m.prefill_query_start_loc.tolist() == [at - decodes for at in bounds[decodes:]]
        assert m.prefill_state_indices.tolist() == slots.tolist()[decodes:]
        lengths = [hi - lo for lo, hi in itertools.pairwise(bounds)]
        chunks = [[i, c] for i, n in enumerate(lengths[decodes:]) for c in range(-(-n // 64))]
        assert m.chunk_indices is not None and m.chunk_indices.tolist() == chunks
        assert m.chunk_offsets is not None and m.chunk_offsets[-1] == len(chunks)
        assert m.nums_dict is not None and m.batch_ptr is not None
        pieces = [i for i, n in enumerate(lengths) for _ in range(-(-n // 8))]
        assert m.batch_ptr[: len(pieces)].tolist() == pieces
    else:
        assert m.has_initial_state is m.chunk_indices is m.nums_dict is None
    conv, state = layer.kv_cache
    caches = Caches(slots, conv, state.transpose(2, 3))
    out = torch.zeros(tokens, HEADS, V, dtype=torch.float64)
    ops = [ComposeOp(lo, hi - lo, -1, Mode.NONE) for lo, hi in itertools.pairwise(bounds)]
    rows = [ComposeRow(i, int(r), i, i + 1) for i, r in enumerate(resumed)]
    records = DevicePool(geometry(slots=1), CPU).linear[NAME]
    reference.gdn_compose(
        Inputs(mixed_qkv, a, b),
        weights_of(layer),
        caches,
        out,
        records,
        pack(rows, ComposeRow),
        pack(ops, ComposeOp),
    )
    core_attn_out[:tokens] = out.to(core_attn_out.dtype)
    layer.stock_rows += tokens


def geometry(slots: int) -> PoolGeometry:
    """Of two layers: on a device their transition blocks stand side by side in one table."""
    linear = [
        LinearGeometry(name, HEADS, K, V, TAPS - 1, CHANNELS, torch.float32) for name in ("before", NAME)
    ]
    return PoolGeometry((), tuple(linear), page_tokens=8, pages=0, slots=slots, transition_blocks=BLOCKS)


BLOCKS = 4 * 2 * HEADS


ALL = ((5, 1), (9, 1), (3, 20), (2, 11), (0, 6))
"""Of each request: tokens behind it, tokens in this pass; decodes first, as vLLM orders a batch."""
DECODES = ((5, 1), (9, 1), (3, 8), (2, 11))
"""Nothing is left to stock code but decodes: the composed request stays before the next block boundary."""


class World:
    """One layer and a batch: two decodes, a composed prefill that passes a block boundary, a segment request
    whose interior ends, a plain prefill, and poisoned padding."""

    def __init__(self, lengths: Sequence[tuple[int, int]] = ALL) -> None:
        gen = torch.Generator().manual_seed(3)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        layer: Any = HypicCUDAGatedDeltaNet.__new__(HypicCUDAGatedDeltaNet)
        nn.Module.__init__(layer)
        layer.prefix, layer.tp_size, layer.num_k_heads, layer.num_v_heads = NAME, 1, KEY_HEADS, HEADS
        layer.cache_config = SimpleNamespace(block_size=BLOCK)
        layer.conv1d = nn.Module()
        layer.conv1d.weight = nn.Parameter(0.5 * normal(CHANNELS, 1, TAPS))
        layer.conv1d.bias = None
        layer.A_log = nn.Parameter(torch.log(1 + torch.rand(HEADS, generator=gen)))
        layer.dt_bias = nn.Parameter(normal(HEADS) - 3)
        layer.stock_rows = 0
        self.layer = layer

        self.lengths = lengths
        computed, scheduled = (np.array(part) for part in zip(*self.lengths, strict=True))
        self.starts = [0, *np.cumsum(scheduled).tolist()]
        self.slots = torch.tensor([4, 1, 7, 2, 5][: len(lengths)], dtype=torch.int32)
        tokens = self.starts[-1]
        self.tokens = tokens

        def rows(width: int) -> Tensor:
            whole = torch.full((tokens + 2, width), math.nan)
            whole[:tokens] = normal(tokens, width)
            return whole

        # As vLLM's projection gives it: a part of wider rows.
        self.mixed = torch.cat([rows(CHANNELS), rows(8)], dim=1)[:, :CHANNELS]
        self.a, self.b = rows(HEADS), rows(HEADS)
        conv, state = torch.full((9, TAPS - 1, CHANNELS), math.nan), torch.full((9, HEADS, V, K), math.nan)
        for (s0, _), slot in zip(self.lengths, self.slots.tolist(), strict=True):
            if s0:
                conv[slot], state[slot] = normal(TAPS - 1, CHANNELS), normal(HEADS, V, K)
        layer.kv_cache = (conv, state)

        self.pool = DevicePool(geometry(slots=4), CPU)
        records = self.pool.linear[NAME]
        records.state.fill_(math.nan), records.conv_tail.fill_(math.nan), records.transitions.fill_(math.nan)
        for slot in (0, 1):
            self.pool.transition_blocks.offer(slot)
            records.state[slot], records.conv_tail[slot] = normal(HEADS, K, V), normal(TAPS - 1, CHANNELS)
            records.transitions[records.block_of[slot].long()] = (0.1 * normal(HEADS, K, K)).half()
        # So that the captured record's transition blocks are not those that come next.
        self.pool.transition_blocks.offer(3)
        self.runtime = HypicRuntime(self.pool, dead_transition=2.0**-25)

        points = (ComposePoint(5, 0, 4, False), ComposePoint(9, 1, 4, False))
        plan = StreamPlan(np.arange(23), 23, points, np.arange(8), np.arange(8), use_transition=True)
        capture = CapturePlan(4, 12, 2, np.arange(8), None, leading=False)
        at = [
            BatchRow(i, self.starts[i], self.starts[i + 1], s0, s0 + n)
            for i, (s0, n) in enumerate(self.lengths)
        ]
        self.step = StepContext(
            [composed_row(at[2], StreamTensors.of(plan, CPU))],
            [capture_row("segment", at[3], capture)],
            CPU,
            Batch.of(computed, scheduled),
        )
        layer.connect(self.runtime)
        self.metadata = GDNAttentionMetadata(
            num_prefills=len(lengths) - 2,
            num_prefill_tokens=tokens - 2,
            num_decodes=2,
            num_decode_tokens=2,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=tokens,
            non_spec_query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            # A column of a block table.
            non_spec_state_indices_tensor=torch.stack([self.slots, self.slots * 0], 1)[:, 0],
        )

    def run(self, step: StepContext | None) -> Tensor:
        """vLLM's operator, as the compiled graph calls it; the rows that count."""
        self.runtime.step = step
        core = torch.zeros(self.tokens + 2, HEADS, V)
        context = ForwardContext(
            no_compile_layers={NAME: self.layer},
            attn_metadata={"before": self.metadata, NAME: self.metadata},
            slot_mapping={},
        )
        with override_forward_context(context):
            qwen_gdn_linear_attn.qwen_gdn_attention_core(self.mixed, self.b, self.a, core, NAME)
        assert not core[self.tokens :].any(), "padding was written"
        return core[: self.tokens]

    def expected(self) -> tuple[Tensor, Caches, DevicePool]:
        """Everything in float64 by the references: outputs, caches, records.  Before :meth:`run`."""
        conv, state = self.layer.kv_cache
        caches = Caches(self.slots, conv.clone(), state.transpose(2, 3).double().clone())
        pool = DevicePool(geometry(slots=4), CPU)
        mine, theirs = pool.linear[NAME], self.pool.linear[NAME]
        for name in ("state", "conv_tail", "transitions", "block_of"):
            getattr(mine, name).copy_(getattr(theirs, name))
        mine.block_of[2] = torch.arange(BLOCKS - HEADS, BLOCKS)  # nobody's
        records = SimpleNamespace(
            state=mine.state.double(),
            conv_tail=mine.conv_tail,
            transitions=mine.transitions.double(),
            block_of=mine.block_of,
        )
        out = torch.zeros(self.tokens, HEADS, V, dtype=torch.float64)
        x, weights = Inputs(self.mixed, self.a, self.b), weights_of(self.layer)
        # The composed request as one walk, whatever block boundary it passes.
        first, stop = self.starts[2], self.starts[3]
        ops = [
            ComposeOp(first, 2, 0, Mode.TRANSITION),
            ComposeOp(first + 2, 4, 1, Mode.TRANSITION),
            ComposeOp(first + 6, stop - first - 6, -1, Mode.NONE),
        ]
        rows = [ComposeRow(2, 1, 0, 3)]
        for i in (0, 1, 4)[: len(self.lengths) - 2]:
            rows.append(ComposeRow(i, int(self.lengths[i][0] > 0), len(ops), len(ops) + 1))
            ops.append(ComposeOp(self.starts[i], self.lengths[i][1], -1, Mode.NONE))
        program = pack(rows, ComposeRow), pack(ops, ComposeOp)
        reference.gdn_compose(x, weights, caches, out, records, *program)
        segments = linear_step(self.step, BLOCK).segments
        assert segments is not None
        reference.gdn_segments(x, weights, caches, out, records, segments.rows, [])
        self.records = records
        return out, caches, pool


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "_forward_core", stock_core)
    monkeypatch.setattr(pool_module, "TransitionBlocks", partial(TransitionBlocks, joint=True))


@pytest.mark.parametrize("lengths", [ALL, DECODES], ids=["prefills", "decodes"])
def test_a_mixed_batch_is_computed_as_its_programs_say(lengths: Sequence[tuple[int, int]]) -> None:
    world = World(lengths)
    out, caches, _ = world.expected()
    ours = world.run(world.step)
    assert (ours.double() - out).abs().max() < LIMIT
    conv, state = world.layer.kv_cache
    used = world.slots.long()
    assert (state.transpose(2, 3)[used].double() - caches.state[used]).abs().max() < LIMIT
    assert torch.equal(conv[used], caches.conv[used])
    others = torch.ones(9, dtype=torch.bool).index_fill_(0, used, False)
    assert state[others].isnan().all() and conv[others].isnan().all(), "slots of nobody were written"


def test_stock_code_runs_its_own_rows_only() -> None:
    """The decodes, the plain prefill, and what the composed request runs after the next block boundary."""
    world = World()
    world.expected()
    world.run(world.step)
    # Stream tokens [16, 23) of the composed request lie behind the boundary after its last point, 9.
    assert world.layer.stock_rows == 2 + 6 + 7
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1}
    assert world.layer.hypic_reached


def test_the_record_is_that_of_the_interior() -> None:
    world = World()
    world.expected()
    world.run(world.step)
    records = world.pool.linear[NAME]
    assert (records.state[2].double() - world.records.state[2]).abs().max() < LIMIT
    assert torch.equal(records.conv_tail[2], world.records.conv_tail[2])
    blocks, wanted = records.block_of[2].long(), world.records.block_of[2].long()
    assert (blocks >= 0).tolist() == (wanted >= 0).tolist() and (blocks >= 0).any()
    alive = blocks >= 0
    error = records.transitions[blocks[alive]].double() - world.records.transitions[wanted[alive]]
    assert error.abs().max() < 1e-3  # fp16


def test_warming_up_leaves_nothing_behind() -> None:
    world = World()
    conv, state = world.layer.kv_cache
    before = conv[1:].clone(), state[1:].clone()
    world.pool.transition_blocks.release([0, 1, 3])
    held = world.pool.linear[NAME].block_of.clone()
    world.layer.warm_up(world.runtime)
    assert torch.equal(conv[1:].nan_to_num(), before[0].nan_to_num())
    assert torch.equal(state[1:].nan_to_num(), before[1].nan_to_num())
    assert torch.equal(world.pool.linear[NAME].block_of, held) and (held < 0).all()
    assert not world.runtime.calls


def test_a_plain_pass_is_stock_code_alone() -> None:
    world = World()
    world.layer.kv_cache[0].nan_to_num_(), world.layer.kv_cache[1].nan_to_num_()
    world.metadata.has_initial_state = torch.tensor([True, True, True, True, False])
    calls: list[int] = []
    world.layer.stock_core = lambda *args: calls.append(len(args[0]))
    world.run(None)
    empty = StepContext([], [], CPU, world.step.batch)
    world.run(empty)
    assert calls == [len(world.mixed)] * 2 and not world.runtime.calls


@pytest.mark.parametrize("fault", ["state order", "slots", "resumed", "record"])
def test_a_fault_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is larger than what is tolerated."""
    world = World()
    out, _, _ = world.expected()
    match fault:
        case "state order":  # the cache read as [K, V], as the CPU operators have it
            world.layer._current_views().state = world.layer.kv_cache[1].view(9, HEADS, K, V)
        case "slots":
            world.metadata.non_spec_state_indices_tensor = world.slots.roll(1, 0)
        case "resumed":
            world.step.batch.computed[4] = 1
        case "record":
            world.pool.linear[NAME].conv_tail[0] += 1
    assert not (world.run(world.step).double() - out).abs().max() < 10 * LIMIT
