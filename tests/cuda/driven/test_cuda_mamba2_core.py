"""The CUDA Mamba2 layer's core, on the CPU: which rows go where, and what comes out.

Stock vLLM's core alone is a stand-in, which believes the metadata that it is given; layer, layout, plans and
Triton operators are the real ones.  Outputs, caches and records of a mixed batch must be those of float64.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixed_batch import (
    ACCEPTED,
    ALL,
    BLOCK,
    CPU,
    DECODES,
    DRAFTED,
    DRAFTED_ALONE,
    DRAFTS,
    LEFT_TO_STOCK,
    SLOTS,
    Lengths,
    accepted_,
    described,
    has_drafts,
    metadata_of,
    programs_of,
    starts_of,
    step_of,
)
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2
from vllm_hypic.backends.ops.mamba2 import Caches, reference
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.states import DecayGeometry
from vllm_hypic.pool.step import StepContext
from vllm_hypic.pool.tensors import DecayRecords, DevicePool

HEADS, GROUPS, P, N, TAPS = 2, 1, 16, 32, 4
INNER, CHANNELS = HEADS * P, HEADS * P + 2 * GROUPS * N
NAME = "model.layers.0.mixer"
CHUNK = 8
"""Token rows of a chunk of vLLM's scan."""
LIMIT = 2e-5
"""Largest error of outputs and states, which are about 1; everything is computed in float32."""


def geometry(slots: int) -> PoolGeometry:
    layer = DecayGeometry(NAME, HEADS, P, N, TAPS - 1, CHANNELS, torch.float32)
    return PoolGeometry((), (layer,), page_tokens=8, pages=0, slots=slots)


def layer_rows(projected: Tensor) -> Any:
    return SimpleNamespace(projected=projected)


def stock_core(layer: Any, projected_states: Tensor, output: Tensor) -> None:
    """What vLLM computes for the batch that the metadata describes, and checks of that description."""
    m: Mamba2AttentionMetadata = get_forward_context().attn_metadata[NAME]
    slots, program = described(m, layer.lengths)
    assert m.chunk_size == CHUNK and m.checkpoint_chunk_idx is m.checkpoint_meta is None
    if m.num_prefills:
        assert m.has_initial_states_p is not None
        assert m.prep_initial_states == bool(m.has_initial_states_p.any())
        check_chunks(m)
    else:
        assert m.cu_chunk_seqlen_p is m.seq_idx_p is m.last_chunk_indices_p is None
    tokens = m.num_decode_tokens + m.num_prefill_tokens
    out = torch.zeros(len(projected_states), INNER, dtype=torch.float64)
    x, heads = layer.by_head(layer_rows(projected_states), out)
    records = DevicePool(geometry(slots=1), CPU).records(NAME, DecayRecords)
    accepted_(layer.lengths, *layer.kv_cache)
    reference.mamba2_compose(x, layer.weights(), layer.caches(slots), heads, records, *program)
    output[:tokens] = out[:tokens].to(output.dtype)
    layer.stock_rows += tokens


def check_chunks(m: Mamba2AttentionMetadata) -> None:
    """Chunks end where those of the whole request do: at multiples of their size."""
    parts = m.cu_chunk_seqlen_p, m.seq_idx_p, m.last_chunk_indices_p
    assert m.query_start_loc_p is not None and all(p is not None and p.dtype == torch.int32 for p in parts)
    starts, ends = m.query_start_loc_p.tolist(), m.seq_lens.tolist()[m.num_decodes :]
    wanted: tuple[list[int], list[int], list[int]] = ([0], [], [])
    for i, (first, stop) in enumerate(itertools.pairwise(starts)):
        behind = ends[i] - (stop - first)
        for at in range(behind, ends[i]):
            if (at + 1) % CHUNK == 0 or at + 1 == ends[i]:
                wanted[0].append(first + at + 1 - behind)
                wanted[1].append(i)
        wanted[2].append(len(wanted[1]) - 1)
    assert tuple(p.tolist() for p in parts if p is not None) == wanted


class World:
    """One layer and a batch: two decodes, a composed prefill that passes a block boundary, a segment request
    whose interior ends, a plain prefill, and poisoned padding."""

    def __init__(self, lengths: Lengths = ALL) -> None:
        gen = torch.Generator().manual_seed(3)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        layer: Any = HypicCUDAMamba2.__new__(HypicCUDAMamba2)
        nn.Module.__init__(layer)
        layer.prefix, layer.tp_size, layer.n_groups, layer.head_dim = NAME, 1, GROUPS, P
        layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size = INNER, CHANNELS, HEADS
        layer.ssm_state_size, layer.conv_kernel_size, layer.stock_rows = N, TAPS, 0
        layer.cache_config = SimpleNamespace(block_size=BLOCK)
        layer.conv1d = nn.Module()
        layer.conv1d.bias = nn.Parameter(0.1 * normal(CHANNELS))
        layer.conv_weights = 0.5 * normal(CHANNELS, TAPS)
        layer.A = nn.Parameter(-0.2 - torch.rand(HEADS, generator=gen))
        layer.dt_bias, layer.D = nn.Parameter(normal(HEADS) - 1), nn.Parameter(normal(HEADS))
        self.layer = layer

        self.lengths = layer.lengths = lengths
        self.tokens = starts_of(lengths)[-1]
        self.slots = torch.tensor(SLOTS[: len(lengths)], dtype=torch.int32)
        self.projected = torch.full((self.tokens + 2, INNER + CHANNELS + HEADS), math.nan)
        self.projected[: self.tokens] = normal(self.tokens, INNER + CHANNELS + HEADS)
        drafts = DRAFTS if has_drafts(lengths) else 0
        conv = torch.full((9, TAPS - 1 + drafts, CHANNELS), math.nan)
        state = torch.full((9, HEADS, P, N), math.nan)
        for (s0, _), slot in zip(lengths, SLOTS, strict=False):
            if s0:
                conv[slot, : TAPS - 1], state[slot] = normal(TAPS - 1, CHANNELS), normal(HEADS, P, N)
        if drafts:
            conv[4, TAPS - 1], state[3] = normal(CHANNELS), normal(HEADS, P, N)
        layer.kv_cache = (conv, state)

        self.pool = DevicePool(geometry(slots=4), CPU)
        records = self.pool.records(NAME, DecayRecords)
        for part in records.parts:
            part.fill_(math.nan)
        for slot in (0, 1):
            records.state[slot], records.conv_tail[slot] = normal(HEADS, P, N), normal(TAPS - 1, CHANNELS)
            records.log_transition[slot] = -torch.rand(HEADS, generator=gen)
        self.runtime = HypicRuntime(self.pool, dead_transition=2.0**-25)

        self.step = step_of(lengths)
        layer.connect(self.runtime)
        self.metadata = metadata_of(Mamba2AttentionMetadata, lengths, chunk_size=CHUNK)

    def run(self, step: StepContext | None) -> Tensor:
        """vLLM's operator, as the compiled graph calls it; the rows that count."""
        self.runtime.step = step
        output = torch.zeros(self.tokens + 2, INNER)
        context = ForwardContext(
            no_compile_layers={NAME: self.layer}, attn_metadata={NAME: self.metadata}, slot_mapping={}
        )
        with override_forward_context(context):
            mamba_mixer2.mamba_mixer2(self.projected, output, NAME)
        assert not output[self.tokens :].any(), "padding was written"
        return output[: self.tokens].unflatten(1, (HEADS, P))

    def expected(self) -> tuple[Tensor, Caches, Any]:
        """Everything in float64 by the references: outputs, caches, records.  Before :meth:`run`."""
        conv, state = self.layer.kv_cache
        conv, state = conv.clone(), state.double()
        accepted_(self.lengths, conv, state)
        caches = Caches(self.slots, conv[:, : TAPS - 1], state)
        theirs = self.pool.records(NAME, DecayRecords)
        records = SimpleNamespace(
            state=theirs.state.double(),
            conv_tail=theirs.conv_tail.clone(),
            log_transition=theirs.log_transition.double(),
        )
        out = torch.zeros(self.tokens, INNER, dtype=torch.float64)
        x, out = self.layer.by_head(layer_rows(self.projected[: self.tokens]), out)
        (composed, segments), weights = programs_of(self.lengths), self.layer.weights()
        reference.mamba2_compose(x, weights, caches, out, records, *composed)
        reference.mamba2_segments(x, weights, caches, out, records, segments, [])
        return out, caches, records


@pytest.fixture(autouse=True)
def _stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaMixer2, "conv_ssm_forward", stock_core)


@pytest.mark.parametrize(
    "lengths", [ALL, DECODES, DRAFTED, DRAFTED_ALONE], ids=["prefills", "decodes", "drafts", "drafts alone"]
)
def test_a_mixed_batch_is_computed_as_its_programs_say(lengths: Lengths) -> None:
    world = World(lengths)
    out, caches, exact = world.expected()
    ours = world.run(world.step)
    assert (ours.double() - out).abs().max() < LIMIT
    conv, state = world.layer.kv_cache
    used = world.slots.long()
    assert (state[used].double() - caches.state[used]).abs().max() < LIMIT
    assert torch.equal(conv[used, : TAPS - 1], caches.conv[used]) and conv[used[2:], TAPS - 1 :].isnan().all()
    others = torch.ones(9, dtype=torch.bool).index_fill_(0, used, False)
    others[3] = not has_drafts(lengths)
    assert state[others].isnan().all() and conv[others].isnan().all(), "slots of nobody were written"
    records = world.pool.records(NAME, DecayRecords)
    assert (records.state[2].double() - exact.state[2]).abs().max() < LIMIT
    assert (records.log_transition[2].double() - exact.log_transition[2]).abs().max() < LIMIT
    assert torch.equal(records.conv_tail[2], exact.conv_tail[2])
    assert all(part[3].isnan().all() for part in records.parts)


def test_stock_code_runs_its_own_rows_only() -> None:
    """The decodes, the plain prefill, and what the composed request runs after the next block boundary."""
    world = World()
    world.run(world.step)
    assert world.layer.stock_rows == LEFT_TO_STOCK
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1}
    assert world.layer.hypic_reached


def test_warming_up_leaves_nothing_behind() -> None:
    world = World()
    before = [part[1:].clone() for part in world.layer.kv_cache]
    records = world.pool.records(NAME, DecayRecords)
    others = [part[1:].clone() for part in records.parts]
    world.layer.warm_up(world.runtime)
    for part, was in zip((*world.layer.kv_cache, *records.parts), (*before, *others), strict=True):
        assert torch.equal(part[1:].nan_to_num(), was.nan_to_num())
    assert not world.runtime.calls


def test_a_plain_pass_is_stock_code_alone() -> None:
    world = World()
    calls: list[int] = []
    world.layer.run_stock = lambda x, out: calls.append(len(x.projected))
    world.run(None)
    world.run(StepContext([], [], CPU, world.step.batch))
    assert calls == [len(world.projected)] * 2 and not world.runtime.calls


def test_a_profile_run_leaves_no_number_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaMixer2, "conv_ssm_forward", lambda *args: None)
    world, output = World(), torch.full((3, INNER), math.nan)
    context = ForwardContext(no_compile_layers={NAME: world.layer}, attn_metadata=None, slot_mapping={})
    with override_forward_context(context):
        mamba_mixer2.mamba_mixer2(world.projected[:3], output, NAME)
    assert not output.any()


@pytest.mark.parametrize("fault", ["slots", "computed", "record", "transition", "accepted", "drafts"])
def test_a_fault_would_show(fault: str) -> None:
    """Each is larger than what is tolerated, or found by the stand-in."""
    world = World(DRAFTED if fault in ("accepted", "drafts") else ALL)
    out, _, _ = world.expected()
    records = world.pool.records(NAME, DecayRecords)
    match fault:
        case "slots":
            world.metadata.state_indices_tensor_p = world.slots[2:].roll(1, 0)
        case "computed":
            world.step.batch.computed[4] = 1
        case "record":
            records.conv_tail[0] += 1
        case "accepted":
            world.metadata.num_accepted_tokens = ACCEPTED.flip(0)
        case "drafts":
            world.metadata.query_start_loc_d = None
        case "transition":
            records.log_transition[0] += 1
    try:
        found = world.run(world.step)
    except AssertionError:
        return
    assert not (found.double() - out).abs().max() < 10 * LIMIT
