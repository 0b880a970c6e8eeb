"""Passes of a model that drafts, made of the model's own pass."""

from dataclasses import replace

import numpy as np
import torch

from vllm_hypic.pool.draft_steps import of_one_token, over_the_same, successors
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
SEGMENT = CapturePlan(0, 3, 0, np.arange(3), np.array([0, 1, 4]), leading=False)


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


def next_tokens(segment: CapturePlan, stream: StreamPlan, s0: int, s1: int, known: int) -> dict[int, int]:
    """Rows and successors of a pass over a segment request's tokens, which are 10, 11 and 12, and over a
    stream's ``[s0, s1)``, of which ``known`` are given: 20, 21 ..."""
    capture = capture_row("s", BatchRow(0, 0, 3, 0, 3), segment)
    composed = composed_row(BatchRow(1, 3, 3 + s1 - s0, s0, s1), StreamTensors.of(stream, CPU))
    of = StepContext([composed], [capture], CPU, Batch.of(np.array([0, s0]), np.array([3, s1 - s0])))
    tokens = np.arange(6) + np.array([[10], [20]])
    found = successors(of, tokens, np.array([3, known]))
    return {} if found is None else dict(zip(*(part.tolist() for part in found), strict=True))


def test_a_token_is_followed_by_the_prompts_next_one() -> None:
    segment, stream = replace(SEGMENT, successor=70), replace(STREAM, successors=((2, 80),))
    # Of a record's last row, before a compose point, and at a chunk's end.
    assert next_tokens(segment, stream, 0, 4, known=5) == {2: 70, 5: 80, 6: 24}
    # A chunk that ends at a compose point; the row is another where the chunk begins later.
    assert next_tokens(segment, stream, 0, 3, known=5) == {2: 70, 5: 80}
    assert next_tokens(segment, stream, 1, 3, known=5) == {2: 70, 4: 80}


def test_what_is_sampled_follows_the_last_token() -> None:
    assert next_tokens(SEGMENT, STREAM, 3, 5, known=5) == {}
    assert next_tokens(SEGMENT, STREAM, 5, 8, known=6) == {}
