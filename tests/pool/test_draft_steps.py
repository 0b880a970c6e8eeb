"""Passes of a model that drafts, made of the model's own pass."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hypic.pool.draft_steps import of_one_token, over_the_same
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import (
    Batch,
    BatchRow,
    StepContext,
    StreamTensors,
    capture_row,
    composed_row,
    rewritten_positions,
)

CPU = torch.device("cpu")
# Stream tokens 0 1 2 | 6 7 with a record of three tokens between them, and a segment with padding inside.
STREAM = StreamPlan(
    positions=np.array([0, 1, 2, 6, 7]),
    n_logical=8,
    points=(ComposePoint(3, 0, 3, replace_state=False),),
    slot_mapping=np.arange(3),
    kv_positions=np.array([3, 4, 5]),
    use_transition=True,
)
SEGMENT = CapturePlan(
    lo=0, hi=3, slot=0, slot_mapping=np.arange(3), positions=np.array([0, 1, 4]), leading=False
)


def step() -> StepContext:
    """A segment's last two tokens, a plain request of one, and the last two tokens of a stream."""
    capture = capture_row("s", BatchRow(0, 0, 2, 1, 3), SEGMENT)
    composed = composed_row(BatchRow(2, 3, 5, 3, 5), StreamTensors.of(STREAM, CPU))
    batch = Batch.of(np.array([1, 9, 3]), np.array([2, 1, 2]))
    return StepContext([composed], [capture], CPU, batch)


def positions(of: StepContext) -> dict[int, int]:
    rewritten = rewritten_positions(of)
    assert rewritten is not None
    return dict(zip(*(part.tolist() for part in rewritten), strict=True))


def test_without_more_rows_it_is_the_same_pass() -> None:
    of = step()
    assert over_the_same(of, 0) is of


def test_each_request_has_one_more_row() -> None:
    of = over_the_same(step(), 1)
    [composed], [capture] = of.composed, of.captures
    assert composed.row == BatchRow(2, 5, 8, 3, 6) and of.batch.starts == [0, 3, 5, 8]
    assert composed.visible_kv_lens.tolist() == [3, 3, 3]
    # The token that was sampled is no part of the record.
    assert (capture.row, capture.begin, capture.end) == (BatchRow(0, 0, 3, 1, 4), 1, 3)
    assert of.captured is not None and of.captured.rows.tolist() == [0, 1]
    assert positions(of) == {0: 1, 1: 4, 2: 4, 5: 6, 6: 7, 7: 8}


def test_a_pass_of_one_token_each_captures_nothing() -> None:
    of = of_one_token(step(), [4, 10, 6])
    assert not of.captures and of.batch.starts == [0, 1, 2, 3]
    assert of.composed[0].row == BatchRow(2, 2, 3, 6, 7)
    assert positions(of) == {2: 9}
