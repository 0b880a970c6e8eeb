"""The CUDA linear layers' cores, on the CPU: which rows go where, and what comes out.

Outputs, caches and records of a mixed batch must be those of float64; see ``mixed_batch.World``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import delta_world
import mamba_worlds
import pytest
import torch
from delta_world import BAILING, KIMI, NAME, QWEN
from mixed_batch import ACCEPTED, ALL, BATCHES, BLOCK, CPU, DRAFTED, LIMIT, Lengths, left_to_stock
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from vllm_hypic.backends.linear.cuda import EVERYTHING, AtOnce, SharedPlans
from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack, unpack
from vllm_hypic.pool.step import StepContext

Make = Callable[..., Any]
WORLDS: dict[str, Make] = {
    "Qwen": partial(delta_world.World, QWEN),
    "Kimi": partial(delta_world.World, KIMI),
    "Bailing V3": partial(delta_world.World, BAILING),
    "Mamba2": mamba_worlds.Mamba2,
    "short convolution": mamba_worlds.ShortConv,
}
EACH = pytest.mark.parametrize("made", WORLDS.values(), ids=WORLDS)
QwenWorld = WORLDS["Qwen"]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    delta_world.install(monkeypatch)
    mamba_worlds.install(monkeypatch)
    with torch.inference_mode():
        yield


@EACH
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_a_mixed_batch_is_computed_as_its_programs_say(made: Make, lengths: Lengths) -> None:
    """Stock code runs its own rows only; requests with drafts are left to it, and beside them prompts compose
    and are captured, in the first rows of a wider state of convolutions."""
    world = made(lengths)
    out, caches, records = world.expected()
    assert (world.run(world.step).double() - out).abs().max() < LIMIT
    world.check(caches, records)
    assert world.layer.stock_rows == left_to_stock(lengths)
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1} and world.layer.hypic_reached


@EACH
def test_warming_up_leaves_nothing_behind(made: Make) -> None:
    world = made()
    delta = isinstance(world, delta_world.World)
    if delta:
        world.pool.transition_blocks.release([0, 1, 3])
    held = [*world.layer.kv_cache, *world.records.parts, *([world.records.block_of] if delta else [])]
    before = [part.clone() for part in held]
    world.layer.warm_up(world.runtime)
    for part, was in zip(held, before, strict=True):
        assert torch.equal(part[1:].nan_to_num(), was[1:].nan_to_num())
    assert not delta or (torch.equal(held[-1], before[-1]) and (held[-1] < 0).all())
    assert not world.runtime.calls


@EACH
def test_a_plain_pass_is_stock_code_alone(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world, calls = made(), list[int]()
    world.layer.run_stock = lambda x, out: calls.append(len(getattr(x, world.rows)))
    # Called without a copy of q, k and v side by side.
    stock = BailingMoeV3KimiDeltaAttention
    monkeypatch.setattr(stock, "_forward", lambda layer, q, *rest: calls.append(len(q)))
    world.run(None)
    world.run(StepContext([], [], CPU, world.step.batch))
    assert calls == [world.tokens + 2] * 2 and not world.runtime.calls


def test_a_profile_run_leaves_no_number_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaMixer2, "conv_ssm_forward", lambda *args: None)
    world = mamba_worlds.Mamba2()
    world.projected, output = world.projected[:3], torch.full((3, *world.width), math.nan)
    with world.context(None):
        world.call(output)
    assert not output.any()


DRAFTS = "accepted", "drafts"
FAULTS = [
    *((name, fault) for name in WORLDS for fault in ("slots", "computed", "record")),
    *((name, "state order") for name in ("Qwen", "Kimi", "Bailing V3")),
    ("Mamba2", "transition"),
    *((name, fault) for name in ("Mamba2", "short convolution") for fault in DRAFTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_would_show(name: str, fault: str) -> None:
    """Each is larger than what is tolerated, or found by the stand-in."""
    world = WORLDS[name](DRAFTED if fault in DRAFTS else ALL)
    out, _, _ = world.expected()
    delta, layer, m = isinstance(world, delta_world.World), world.layer, world.metadata
    match fault:
        case "slots" if delta:
            m.non_spec_state_indices_tensor = world.slots.roll(1, 0)
        case "slots":
            m.state_indices_tensor_p = world.slots[2:].roll(1, 0)
        case "computed":
            world.step.batch.computed[4] = 1
        case "record":
            world.records.conv_tail[0] += 1
        case "state order":  # the cache read as [K, V], as the CPU operators have it
            kind = world.kind
            layer._current_views().state = layer.kv_cache[1].view(9, kind.heads, kind.K, kind.V)
        case "transition":
            world.records.log_transition[0] += 1
        case "accepted":
            m.num_accepted_tokens = ACCEPTED.flip(0)
        case "drafts":
            m.query_start_loc_d = None
    try:
        found = world.run(world.step)
    except AssertionError:
        assert not delta
        return
    assert not (found.double() - out).abs().max() < 10 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rows of others", "accepted", "slots of others"])
def test_a_fault_beside_drafts_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = QwenWorld(DRAFTED)
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
    world = QwenWorld(DRAFTED)
    out, _, _ = world.expected()
    layer = world.layer
    inner = QWEN.heads * QWEN.V
    layer.key_dim, layer.value_dim, layer.head_v_dim = QWEN.key_heads * QWEN.K, inner, QWEN.V
    gate = torch.rand(len(world.mixed), inner)
    given = torch.cat([world.mixed, gate], -1), torch.cat([world.b, world.a], -1)

    def run(step: StepContext | None, metadata: Any) -> torch.Tensor:
        world.runtime.step = step
        core = torch.zeros(len(world.mixed), *world.width)
        with world.context(metadata):
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


def test_many_segments_are_captured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summaries of all interiors at once might not fit; the records are the same."""
    world = QwenWorld()
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
        fresh = QwenWorld()
        fresh.pool.transition_blocks.offer(2)
        monkeypatch.setattr(type(fresh.layer), "_segments_at_once", lambda self, most=most: most)
        x, core = GatedDeltaInputs(fresh.mixed, fresh.a, fresh.b), torch.zeros(fresh.tokens + 2, *fresh.width)
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
    world = QwenWorld()
    first = linear_step(world.step, BLOCK).composed
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
        fresh = QwenWorld()
        x, core = GatedDeltaInputs(fresh.mixed, fresh.a, fresh.b), torch.zeros(fresh.tokens + 2, *fresh.width)
        monkeypatch.setattr(type(fresh.layer), "_at_once", lambda self, most=most: most)
        monkeypatch.setattr(type(fresh.layer), "_slots", lambda self, step: world.slots)
        fresh.layer.run_composed(fresh.runtime, fresh.step, both, x, core)
        found.append((core, *fresh.layer.kv_cache))
    assert found[0][0][rows : rows + n].any()
    for one in found[1:]:
        for ours, theirs in zip(one, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, atol=LIMIT, rtol=LIMIT)
