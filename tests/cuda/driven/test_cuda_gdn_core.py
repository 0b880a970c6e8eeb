"""The CUDA gated delta nets' core, on the CPU: which rows go where, and what comes out.

Stock vLLM's recurrence alone is a stand-in; layer, layout, plans and Triton operators are the real ones.
Outputs, caches and records of a mixed batch must be those of float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from delta_world import (
    ALL,
    BAILING,
    BLOCK,
    CPU,
    DECODES,
    DRAFTED,
    DRAFTED_ALONE,
    DRAFTS,
    HEADS,
    KIMI,
    NAME,
    QWEN,
    TAPS,
    K,
    Kind,
    World,
    bailing_stock,
    kimi_stock,
    stock_core,
)
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_hypic.backends.linear.cuda import EVERYTHING, AtOnce, SharedPlans
from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.gated_delta import Inputs
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack, unpack
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.step import StepContext
from vllm_hypic.pool.transition_blocks import TransitionBlocks

LIMIT = 2e-5
"""Largest error of outputs and states, which are about 1; everything is computed in float32."""
KINDS = pytest.mark.parametrize("kind", [QWEN, KIMI, BAILING], ids=["Qwen", "Kimi", "Bailing V3"])


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "_forward_core", stock_core)
    monkeypatch.setattr(KimiGatedDeltaNetAttention, "_forward", kimi_stock)
    monkeypatch.setattr(BailingMoeV3KimiDeltaAttention, "_forward", bailing_stock)
    monkeypatch.setattr(pool_module, "TransitionBlocks", partial(TransitionBlocks, joint=True))


@KINDS
@pytest.mark.parametrize("lengths", [ALL, DECODES], ids=["prefills", "decodes"])
def test_a_mixed_batch_is_computed_as_its_programs_say(
    kind: Kind, lengths: Sequence[tuple[int, int]]
) -> None:
    world = World(kind, lengths)
    out, caches, _ = world.expected()
    ours = world.run(world.step)
    assert (ours.double() - out).abs().max() < LIMIT
    conv, state = world.layer.kv_cache
    used = world.slots.long()
    assert (state.transpose(2, 3)[used].double() - caches.state[used]).abs().max() < LIMIT
    assert torch.equal(conv[used], caches.conv[used])
    others = torch.ones(9, dtype=torch.bool).index_fill_(0, used, False)
    assert state[others].isnan().all() and conv[others].isnan().all(), "slots of nobody were written"


@KINDS
@pytest.mark.parametrize("lengths", [DRAFTED, DRAFTED_ALONE], ids=["prefills", "drafts alone"])
def test_requests_with_drafts_are_left_to_stock_code(kind: Kind, lengths: Sequence[tuple[int, int]]) -> None:
    """Beside them prompts compose and are captured, in the first rows of a wider state of convolutions."""
    world = World(kind, lengths, DRAFTS)
    out, caches, _ = world.expected()
    ours = world.run(world.step)
    assert (ours.double() - out).abs().max() < LIMIT
    assert world.layer.stock_rows == 4 + (6 + 7 if lengths is DRAFTED else 0)
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1}
    conv, state = world.layer.kv_cache
    used = world.slots[2:].long()
    assert (state.transpose(2, 3)[used].double() - caches.state[used]).abs().max() < LIMIT
    assert torch.equal(conv[used, : TAPS - 1], caches.conv[used]) and conv[used, TAPS - 1 :].isnan().all()
    # Behind the last token of each request with drafts; the other slots of the second are untouched.
    for slot, of in ((6, 4), (1, 1)):
        assert (state[slot].mT.double() - caches.state[of]).abs().max() < LIMIT
    assert state[8].isnan().all() and state[0].isnan().all()
    records = world.pool.linear[NAME]
    assert torch.equal(records.conv_tail[2], world.records.conv_tail[2])
    assert (records.state[2].double() - world.records.state[2]).abs().max() < LIMIT


@pytest.mark.parametrize("fault", ["rows of others", "accepted", "slots of others"])
def test_a_fault_beside_drafts_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(QWEN, DRAFTED, DRAFTS)
    out, _, _ = world.expected()
    sub_batch = HypicCUDAGatedDeltaNet.sub_batch

    def faulty(layer: Any, *given: Any) -> Any:
        made = sub_batch(layer, *given)
        match fault:
            case "rows of others":
                mine, others = made.spec_token_indx.clone(), made.non_spec_token_indx.clone()
                mine[0], others[0] = others[0].clone(), mine[0].clone()
                return replace(made, spec_token_indx=mine, non_spec_token_indx=others)
            case "accepted":
                return replace(made, num_accepted_tokens=made.num_accepted_tokens.flip(0))
            case _:
                slots = made.non_spec_state_indices_tensor.roll(1, 0)
                return replace(made, non_spec_state_indices_tensor=slots, prefill_state_indices=slots)

    monkeypatch.setattr(HypicCUDAGatedDeltaNet, "sub_batch", faulty)
    assert not (world.run(world.step).double() - out).abs().max() < 10 * LIMIT


def test_the_operator_that_norms_calls_ours_where_not_all_have_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's models of bfloat16 call it in engines with drafts; gate and norm are stand-ins."""
    stock, fused = QwenGatedDeltaNetAttention, list[int]()
    monkeypatch.setattr(stock, "_rms_norm_gated_cuda", lambda layer, x, gate, out: out.copy_(x * gate))
    monkeypatch.setattr(
        stock,
        "_can_use_fused_gdn_mtp_decode",
        lambda layer, m: m.spec_sequence_masks is not None and m.num_decodes == 0,
    )
    monkeypatch.setattr(
        stock, "_forward_core_decode_spec_fused_norm", lambda layer, **given: fused.append(len(given["b"]))
    )
    monkeypatch.setattr(stock, "_warmup_prefill_kernels", lambda *given: None)
    monkeypatch.setattr(stock, "split_ba", lambda layer, ba: ba.chunk(2, dim=-1), raising=False)
    world = World(QWEN, DRAFTED, DRAFTS)
    out, _, _ = world.expected()
    layer = world.layer
    layer.key_dim, layer.value_dim, layer.head_v_dim = QWEN.key_heads * K, HEADS * QWEN.V, QWEN.V
    gate = torch.rand(len(world.mixed), HEADS * QWEN.V)
    given = torch.cat([world.mixed, gate], -1), torch.cat([world.b, world.a], -1)

    def run(step: StepContext | None, metadata: Any) -> torch.Tensor:
        world.runtime.step = step
        core = torch.zeros(len(world.mixed), HEADS, QWEN.V)
        by_layer = None if metadata is None else {"before": metadata, NAME: metadata}
        context = ForwardContext(no_compile_layers={NAME: layer}, attn_metadata=by_layer, slot_mapping={})
        with override_forward_context(context):
            qwen_gdn_linear_attn.qwen_gdn_attention_core_fused_norm_packed(*given, core, NAME)
        return core

    assert not layer.hypic_reached
    run(None, None)
    assert layer.hypic_reached, "a start-up with compiled graphs would be refused"
    ours = run(world.step, world.metadata)[: world.tokens]
    wanted = out * gate[: world.tokens].view(out.shape)
    assert not fused and (ours.double() - wanted).abs().max() < LIMIT
    run(world.step, replace(world.metadata, num_prefills=0))
    assert fused == [len(world.mixed)]


@KINDS
def test_stock_code_runs_its_own_rows_only(kind: Kind) -> None:
    """The decodes, the plain prefill, and what the composed request runs after the next block boundary."""
    world = World(kind)
    world.expected()
    world.run(world.step)
    # Stream tokens [16, 23) of the composed request lie behind the boundary after its last point, 9.
    assert world.layer.stock_rows == 2 + 6 + 7
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1}
    assert world.layer.hypic_reached


@KINDS
def test_the_record_is_that_of_the_interior(kind: Kind) -> None:
    world = World(kind)
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


def test_many_segments_are_captured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summaries of all interiors at once might not fit; the records are the same."""
    world = World(QWEN)
    (rows,) = linear_step(world.step, BLOCK).segments
    other = rows.rows.clone()
    fields = SegmentRow._fields
    other[:, fields.index("batch_row")], other[:, fields.index("slot")] = 4, 3
    other[:, fields.index("resumed")] = 0
    n = world.starts[5] - world.starts[4]
    for name, at in (("first", 0), ("begin", 1), ("end", n), ("stop", n)):
        other[:, fields.index(name)] = world.starts[4] + at
    both = replace(rows, rows=torch.cat([rows.rows, other]))
    shared, found = SharedPlans(), []
    for most in (1, 2):
        plans = shared.segment_parts(both, CPU, AtOnce(most))
        assert [len(plan.scans) for plan in plans] == [most] * (2 // most)
        assert shared.segment_parts(both, CPU, AtOnce(most)) is plans
        fresh = World(QWEN)
        fresh.pool.transition_blocks.offer(2)
        monkeypatch.setattr(type(fresh.layer), "_segments_at_once", lambda self, most=most: most)
        x, core = Inputs(fresh.mixed, fresh.a, fresh.b), torch.zeros(fresh.tokens + 2, HEADS, QWEN.V)
        monkeypatch.setattr(type(fresh.layer), "_slots", lambda self, step: world.slots)
        fresh.layer.run_segments(fresh.runtime, fresh.step, both, x, core)
        records = fresh.pool.linear[NAME]
        assert not records.state[2:4].isnan().any()
        found.append((core, records.state[2:4], records.conv_tail[2:4], *fresh.layer.kv_cache))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_requests_whose_chunks_lack_many_rows_are_composed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of one that stock code ran, another is composed; alone or beside the first, results are the
    same."""
    world = World(QWEN)
    first = linear_step(world.step, BLOCK).composed
    assert first is not None
    rows, n = world.starts[4], world.starts[5] - world.starts[4]
    other = ComposeRow(4, 0, len(first.ops), len(first.ops) + 1), ComposeOp(rows, n, -1, Mode.NONE)
    more = [pack([of], type(of)) for of in other]
    both = replace(
        first, rows=torch.cat([first.rows, more[0]]), ops=torch.cat([first.ops, more[1]]), shifts=first.shifts
    )
    lacking = [sum(-op.tokens % 32 for op in unpack(first.ops, ComposeOp)), -n % 32]
    found = []
    for most, parts in (
        (EVERYTHING, 1),
        (AtOnce(unfilled=sum(lacking)), 1),
        (AtOnce(unfilled=sum(lacking) - 1), 2),
    ):
        plans = SharedPlans().compose_parts(both, CPU, most)
        assert [len(plan.scans) for plan in plans] == [2 // parts] * parts
        fresh = World(QWEN)
        x, core = Inputs(fresh.mixed, fresh.a, fresh.b), torch.zeros(fresh.tokens + 2, HEADS, QWEN.V)
        monkeypatch.setattr(type(fresh.layer), "_at_once", lambda self, most=most: most)
        monkeypatch.setattr(type(fresh.layer), "_slots", lambda self, step: world.slots)
        fresh.layer.run_composed(fresh.runtime, fresh.step, both, x, core)
        found.append((core, *fresh.layer.kv_cache))
    assert found[0][0][rows : rows + n].any()
    for one in found[1:]:
        for ours, theirs in zip(one, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, atol=LIMIT, rtol=LIMIT)


@KINDS
def test_warming_up_leaves_nothing_behind(kind: Kind) -> None:
    world = World(kind)
    conv, state = world.layer.kv_cache
    before = conv[1:].clone(), state[1:].clone()
    world.pool.transition_blocks.release([0, 1, 3])
    held = world.pool.linear[NAME].block_of.clone()
    world.layer.warm_up(world.runtime)
    assert torch.equal(conv[1:].nan_to_num(), before[0].nan_to_num())
    assert torch.equal(state[1:].nan_to_num(), before[1].nan_to_num())
    assert torch.equal(world.pool.linear[NAME].block_of, held) and (held < 0).all()
    assert not world.runtime.calls


@KINDS
def test_a_plain_pass_is_stock_code_alone(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(kind)
    world.layer.kv_cache[0].nan_to_num_(), world.layer.kv_cache[1].nan_to_num_()
    world.metadata.has_initial_state = torch.tensor([True, True, True, True, False])
    calls: list[int] = []
    world.layer.run_stock = lambda x, out: calls.append(len(x.mixed))
    # Called without a copy of q, k and v side by side.
    stock = BailingMoeV3KimiDeltaAttention
    monkeypatch.setattr(stock, "_forward", lambda layer, q, *rest: calls.append(len(q)))
    world.run(None)
    empty = StepContext([], [], CPU, world.step.batch)
    world.run(empty)
    assert calls == [len(world.mixed)] * 2 and not world.runtime.calls


@KINDS
@pytest.mark.parametrize("fault", ["state order", "slots", "resumed", "record"])
def test_a_fault_would_show(kind: Kind, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is larger than what is tolerated."""
    world = World(kind)
    out, _, _ = world.expected()
    match fault:
        case "state order":  # the cache read as [K, V], as the CPU operators have it
            world.layer._current_views().state = world.layer.kv_cache[1].view(9, HEADS, K, kind.V)
        case "slots":
            world.metadata.non_spec_state_indices_tensor = world.slots.roll(1, 0)
        case "resumed":
            world.step.batch.computed[4] = 1
        case "record":
            world.pool.linear[NAME].conv_tail[0] += 1
    assert not (world.run(world.step).double() - out).abs().max() < 10 * LIMIT
