"""Models that draft, on the CPU: vLLM's proposers and their own kernels, which find slots by positions.

Those of a composed request are logical; where its drafts lie in vLLM's cache must be where they would for its
stream alone.
"""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import device_rules
import numpy as np
import pytest
import torch
from mixed_batch import pass_of
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_hypic.engine import drafter
from vllm_hypic.engine.drafter import ComposingDraftModel, ComposingHead
from vllm_hypic.pool import step as pool_step
from vllm_hypic.pool.plans import ComposePoint, StreamPlan
from vllm_hypic.pool.step import StepContext

CPU = torch.device("cpu")
LENGTHS = ((20, 3), (17, 3), (2, 7))
"""Of each request tokens behind it, in the stream, and in this pass: a plain and a composed decode, of which
one and two drafts were rejected, and a composed prefill."""
INDICES = torch.cat([torch.arange(s0, s0 + n) for s0, n in LENGTHS])
REJECTED = torch.tensor([1, 2, 0], dtype=torch.int32)
BLOCK, LONGEST, MOST = 8, 128, 64
AHEAD = 30
"""Logical tokens that the streams of composed requests leave out before their first."""
KINDS = pytest.mark.parametrize(
    ("ours", "stock", "extra"),
    [(ComposingDraftModel, DraftModelProposer, 1), (ComposingHead, EagleProposer, 0)],
    ids=["draft model", "head"],
)


def proposer(kind: Any, extra: int, mrope: bool = False) -> Any:
    """With the buffers of an engine, and no model."""
    made: Any = kind.__new__(kind)
    made.device, made.block_size, made.max_model_len, made.method = CPU, BLOCK, LONGEST, "eagle"
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=mrope))
    made.uses_mrope, made.mrope_positions = mrope, torch.zeros(3, MOST + 1, dtype=torch.int64)
    made.uses_xdrope_dim = made.use_heterogeneous_vocab = False
    made.needs_extra_input_slots, made.pass_hidden_states_to_model = bool(extra), not extra
    made.extra_slots_per_request, made.net_num_new_slots_per_request = 1, extra
    made.parallel_drafting, made.parallel_drafting_token_id = False, 0
    made.positions, made.input_ids = torch.zeros(MOST, dtype=torch.int64), torch.zeros(MOST).int()
    made.hidden_states = torch.zeros(MOST, 4)
    made.is_rejected_token_mask = torch.zeros(MOST, dtype=torch.bool)
    made.is_masked_token_mask = made.is_rejected_token_mask.clone()
    made._slot_mapping_buffer, made.arange = torch.zeros(MOST, dtype=torch.int64), torch.arange(MOST).int()
    made.runtime = SimpleNamespace(step=None)
    made._runner = SimpleNamespace(
        input_batch=SimpleNamespace(token_ids_cpu=None, num_tokens_no_spec=np.zeros(len(LENGTHS), int))
    )
    return made


def step_of() -> StepContext:
    tokens, columns = 40, np.arange(AHEAD)
    points = (ComposePoint(0, 0, AHEAD, False),)
    plan = StreamPlan(np.arange(tokens) + AHEAD, tokens + AHEAD, points, columns, columns, True)
    return pass_of(LENGTHS, {1: plan, 2: plan}, {})


def common() -> CommonAttentionMetadata:
    scheduled = torch.tensor([n for _, n in LENGTHS])
    starts = torch.cat([torch.zeros(1), scheduled.cumsum(0)]).int()
    used = torch.tensor([s0 + n for s0, n in LENGTHS], dtype=torch.int32)
    table = torch.arange(1, 1 + len(LENGTHS) * LONGEST // BLOCK, dtype=torch.int32).view(len(LENGTHS), -1)
    request = torch.repeat_interleave(torch.arange(len(LENGTHS)), scheduled)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=used,
        num_reqs=len(LENGTHS),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(scheduled.max()),
        max_seq_len=int(used.max()),
        block_table_tensor=table,
        slot_mapping=table[request, INDICES // BLOCK].long() * BLOCK + INDICES % BLOCK,
        seq_lens_cpu_upper_bound=used.clone(),
    )


def run(made: Any, step: StepContext | None, positions: torch.Tensor) -> list[dict[str, Any]]:
    """A first pass and two of one token each, as ``propose`` sets them up: what the model is given."""
    made.runtime.step = step
    given = common()
    last = given.query_start_loc[1:] - 1 - REJECTED
    tokens, sampled, now = made.set_inputs_first_pass(
        target_token_ids=torch.arange(given.num_actual_tokens).int() + 100,
        next_token_ids=torch.tensor([7, 8, 9], dtype=torch.int32),
        target_positions=positions.clone(),
        target_hidden_states=torch.zeros(given.num_actual_tokens, 4),
        token_indices_to_sample=None if made.needs_extra_input_slots else last,
        cad=given,
        num_rejected_tokens_gpu=REJECTED,
    )

    def seen(count: int) -> dict[str, Any]:
        found = {
            "positions": made._get_positions(count),
            "tokens": made.input_ids[:count],
            "slots": now.slot_mapping[:count],
            "lengths": now.seq_lens,
            "sampled": sampled,
        }
        return {name: part.clone() for name, part in found.items()} | {"step": made.runtime.step}

    passes = [seen(tokens)]
    at, now = made._get_positions(MOST)[..., sampled], copy.copy(now)
    now.seq_lens = now.seq_lens - REJECTED
    for _ in range(2):
        at = made._update_positions_dependent_metadata(at, now, len(LENGTHS), len(LENGTHS), BLOCK)
        passes.append(seen(len(LENGTHS)))
    return passes


def logical(step: StepContext) -> torch.Tensor:
    """Positions of the model's pass."""
    indices = INDICES.clone()
    for c in step.composed:
        indices[c.row.q0 : c.row.q1] += AHEAD
    return indices


def compare(ours: Any, stock: Any, extra: int, moved: torch.Tensor | None = None) -> None:
    """Passes over drafts of composed requests and of their streams alone; ``moved``: to where images move the
    model's positions."""
    step, mrope = step_of(), moved is not None
    coordinates = torch.zeros(1, dtype=torch.int64) if moved is None else moved
    wanted = run(proposer(stock, extra, mrope), None, INDICES.expand(3, -1) if mrope else INDICES)
    found = run(proposer(ours, extra, mrope), step, logical(step) + coordinates)
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name in ("tokens", "slots", "lengths", "sampled"):
            assert torch.equal(mine[name], theirs[name]), (i, name)
        # The request without records is where vLLM has it; others are where the prompt has them.
        composed = torch.ones(mine["positions"].shape[-1], dtype=torch.bool)
        composed[: 3 + extra if i == 0 else 1] = False
        counted = torch.ones_like(composed) if i or not extra else ~rejected(extra)
        theirs_moved = (theirs["positions"][0] if mrope else theirs["positions"]) + AHEAD * composed
        assert torch.equal(mine["positions"][..., counted], (theirs_moved + coordinates)[..., counted]), i
        # What attends to records has the rows that vLLM has, and their places in the stream.
        for c, (s0, n) in zip(mine["step"].composed, LENGTHS[1:], strict=True):
            assert c.row.s1 - c.row.s0 == c.row.q1 - c.row.q0 == (n + extra if i == 0 else 1)
            assert c.row.s0 == s0 if i == 0 else c.row.s1 == theirs["lengths"][c.row.index]


def rejected(extra: int) -> torch.Tensor:
    """Rows of the first pass that stand for drafts that were rejected."""
    found = [torch.arange(n + extra) >= n + extra - r for (_, n), r in zip(LENGTHS, REJECTED, strict=True)]
    return torch.cat(found)


@KINDS
def test_drafts_lie_where_those_of_the_stream_would(ours: Any, stock: Any, extra: int) -> None:
    compare(ours, stock, extra)


def test_coordinates_of_images_are_kept() -> None:
    """Of a head that comes with a model that sees (MTP of Qwen3.5): vLLM's slots follow from the stream, what
    it reads from where images moved text to."""
    compare(ComposingHead, EagleProposer, 0, torch.tensor([[0], [5], [9]]))


@KINDS
def test_without_records_vllm_drafts_alone(ours: Any, stock: Any, extra: int) -> None:
    wanted, found = run(proposer(stock, extra), None, INDICES), run(proposer(ours, extra), None, INDICES)
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs if name != "step")


@KINDS
def test_slots_by_logical_positions_would_show(ours: Any, stock: Any, extra: int) -> None:
    step, positions = step_of(), logical(step_of())
    wanted, found = run(proposer(ours, extra), step, positions), run(proposer(stock, extra), None, positions)
    assert any(not torch.equal(a["slots"], b["slots"]) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("ours", "extra", "mrope", "host"),
    [
        (ComposingDraftModel, 1, False, None),
        (ComposingHead, 0, False, None),
        (ComposingHead, 0, True, None),
        (ComposingHead, 0, False, pool_step),
        (ComposingHead, 0, True, drafter),
    ],
    ids=["draft model", "head", "head of a model that sees", "fault", "fault of one that sees"],
)
def test_positions_alone_are_waited_for(
    ours: Any, extra: int, mrope: bool, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each further draft, on a GPU: see ``driven/device_rules.py``.  ``host``: a module whose uploads stay
    on the host, which would show."""
    others = [named for named in device_rules.UPLOADS if named[0] is not host]
    monkeypatch.setattr(device_rules, "UPLOADS", others)
    made, step, given = proposer(ours, extra, mrope), step_of(), common()
    monkeypatch.setattr(sys.modules[__name__], "common", lambda: given)
    positions = logical(step)
    if mrope:
        positions = positions.expand(3, -1)
    with device_rules.device(monkeypatch) as here:
        here.own(vars(made), vars(given), REJECTED, positions, [vars(c.stream) for c in step.composed])
        run(made, step, positions)
    found = {line.partition(":")[0] + line.rpartition(":")[2] for line in here.broken}
    assert (found == {"engine/drafter.py tolist()"}) is (host is None)
