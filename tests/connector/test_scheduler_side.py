"""Segment requests as the scheduler side asks for them and describes them to the worker."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.connector.scheduler.segment_requests import SegmentRequest
from vllm_hypic.connector.scheduler.side import SchedulerSide
from vllm_hypic.pool.plans import CapturePlan

from .test_scheduler_store import IDS, QUERY, compute, end
from .test_scheduler_store import side as store_side

PAGE = 4
LEAD, DOCUMENT = list(range(10, 30)), list(range(100, 140))
PROMPT = [*LEAD, IDS.sep, *DOCUMENT, IDS.sep, *QUERY]


def side(**options: Any) -> SchedulerSide:
    return store_side(**{"store": False, "seam_tokens": 3, **options})


def admit(on: SchedulerSide, tokens: list[int], name: str = "r", **extra: Any) -> None:
    plan = on.planner.plan(PlanRequest(tokens, extra or None, None, None))
    assert plan is not None
    on.admit(name, plan)


def pumped(on: SchedulerSide, tokens: list[int], **extra: Any) -> list[tuple[SegmentRequest, CapturePlan]]:
    admit(on, tokens, **extra)
    jobs = on.pump()
    return [(job, plan) for job in jobs for plan in on.views.captures(job.request_id)]


@pytest.mark.parametrize(
    ("link", "lo", "sent"),
    [
        ("hypic", 3, DOCUMENT[:-3]),
        ("epic-5", 5, DOCUMENT),
        ("block", 0, DOCUMENT),
        ("epic-0", 4, DOCUMENT[:1] * 4 + DOCUMENT),
        ("seam-5-2+6", 11, LEAD[:6] + DOCUMENT[:-2]),
    ],
)
def test_segment_request_ends_with_its_interior(link: str, lo: int, sent: list[int]) -> None:
    """Nothing depends on what follows the interior: attention and recurrence look back only."""
    (lead, leading), (job, plan) = pumped(side(), PROMPT, hypic_link=link)
    assert lead.token_ids == LEAD and (leading.lo, leading.hi, leading.leading) == (0, len(LEAD), True)
    assert job.token_ids == sent and (plan.lo, plan.hi, plan.leading) == (lo, len(sent), False)
    for capture in (leading, plan):
        assert capture.positions is None and len(capture.slot_mapping) == capture.hi - capture.lo
    assert job.for_request == lead.for_request == "r"


def test_positions_of_a_segment_with_padding() -> None:
    """One for every token that is sent, dummies first; the padding inside takes a position."""
    tokens = [LEAD[0], IDS.sep, *DOCUMENT[:20], IDS.pad, IDS.pad, *DOCUMENT[20:], IDS.sep, *QUERY]
    expected = [*range(20), *range(22, 39)]
    for link, dummies, kept in (("hypic", 0, 37), ("epic-0", 4, 40), ("seam-0-0+9", 1, 40)):
        ((job, plan),) = pumped(side(), tokens, hypic_link=link)
        assert plan.positions is not None and len(plan.positions) == plan.hi == len(job.token_ids)
        assert plan.hi == dummies + kept
        assert plan.positions[: dummies + 37].tolist() == [*range(dummies), *(p + dummies for p in expected)]
        assert plan.local_positions(dummies + 18, dummies + 22).tolist() == [
            p + dummies for p in (18, 19, 22, 23)
        ]


@pytest.mark.parametrize(
    ("options", "link", "shift"),
    [
        ({}, "hypic", 20),
        ({}, "epic-0", 16),  # behind four dummies
        ({}, "seam-5-2+6", 14),  # behind six tokens of the leading segment
        ({"context": "lead"}, "hypic", 0),  # behind all of it
    ],
)
def test_records_are_moved_from_where_they_were_computed(
    options: dict[str, str], link: str, shift: int
) -> None:
    """All parts of a record by as much; a leading one stands where it was."""
    on = side(**options)
    admit(on, PROMPT, hypic_link=link)
    while compute(on):
        pass
    stream = on.views.stream_plan("r")
    assert stream is not None and [point.shift for point in stream.points] == [0, shift]


@pytest.mark.parametrize(
    ("link", "behind_record", "behind_stream"),
    [
        ("seam-3-2", DOCUMENT[-2], ((2, DOCUMENT[3]),)),
        ("epic-5", None, ((4, DOCUMENT[5]),)),
        # The first of two records is all that stands behind nothing.
        ("block", None, ()),
    ],
)
def test_successors_that_are_in_records(
    link: str, behind_record: int | None, behind_stream: tuple[tuple[int, int], ...]
) -> None:
    on = side()
    lead, document = pumped(on, PROMPT, hypic_link=link)
    assert (lead[1].successor, document[1].successor) == (None, behind_record)
    end(on, lead[0], document[0])
    stream = on.views.stream_plan("r")
    assert stream is not None and stream.successors == behind_stream


def test_a_leading_record_ends_before_its_segments_last_token_where_successors_are_read() -> None:
    (lead, capture), _ = pumped(side(reads_successors=True), PROMPT)
    assert lead.token_ids == LEAD[:-1] and capture.successor == LEAD[-1]
    assert len(capture.slot_mapping) == len(LEAD) - 1


def test_configured_dummy_token() -> None:
    ((job, _),) = pumped(side(dummy_token=7), [IDS.sep, *DOCUMENT, IDS.sep, *QUERY], hypic_link="epic-0")
    assert job.token_ids == [7] * 4 + DOCUMENT


def test_all_segments_of_a_prompt_are_asked_for_at_once() -> None:
    on = side()
    documents = [[100 * i + j for j in range(30)] for i in range(1, 5)]
    jobs = pumped(on, [IDS.sep, *(t for d in documents for t in (*d, IDS.sep)), *QUERY])
    assert [job.token_ids for job, _ in jobs] == [d[:-3] for d in documents]
    slots = [set((plan.slot_mapping // PAGE).tolist()) for _, plan in jobs]
    assert all(not (a & b) for a, b in pairwise(slots)), "two records share a page"
    assert not on.ready("r")
    for job, _ in jobs[:-1]:
        end(on, job)
        assert not on.ready("r")
    on.finished(jobs[-1][0].request_id, completed=True)
    assert on.ready("r"), "with the last segment's end the request may run"
    assert on.pump() == []


def test_counters() -> None:
    """Logical prompt tokens: what seams compute twice is counted as seam, not again."""
    on = side()
    tokens = [IDS.sep, *DOCUMENT, IDS.sep, *QUERY]
    ((job, _),) = pumped(on, tokens)
    end(on, job)
    admit(on, tokens, "warm")
    assert on.pump() == []
    counters = on.take_counters()
    assert (counters.segments_queried, counters.segments_hit, counters.segments_computed) == (2, 1, 1)
    assert counters.tokens_reused == 34 and counters.seam_tokens == 12
    assert counters.tokens_computed == 42 + 42 - 34
    assert on.take_counters() == counters.levels(), "nothing has happened since"


def test_local_positions_without_padding_are_indices() -> None:
    plan = CapturePlan(3, 9, 0, np.arange(6), None, leading=False)
    assert plan.local_positions(4, 7).tolist() == [4, 5, 6]
