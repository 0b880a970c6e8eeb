"""Segment requests as the scheduler side asks for them, and describes them to the worker; behind a context;
and when nobody waits for their records any more."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from vllm_hypic.connector.orders import PushRecord, SaveRecord
from vllm_hypic.connector.scheduler.connector import PassStart, SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Lookup
from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.connector.scheduler.segment_requests import SegmentRequest
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.primitives.keys import Role, SegmentKey

from .test_scheduler_store import IDS, QUERY, STORE, compute, end, fetched, say, step
from .test_scheduler_store import side as store_side

PAGE = 4
LEAD, DOCUMENT = list(range(10, 30)), list(range(100, 140))
PROMPT = [*LEAD, IDS.sep, *DOCUMENT, IDS.sep, *QUERY]


def side(**options: Any) -> SchedulerConnector:
    return store_side(**{"store": False, "seam_tokens": 3, **options})


def admit(on: SchedulerConnector, tokens: list[int], name: str = "r", **extra: Any) -> None:
    plan = on.plan(PlanRequest(tokens, on.spec(extra or None, len(tokens)), None, None))
    assert plan is not None
    on.admit(name, plan)


def pumped(
    on: SchedulerConnector, tokens: list[int], **extra: Any
) -> list[tuple[SegmentRequest, CapturePlan]]:
    admit(on, tokens, **extra)
    jobs = on.begin_pass().segment_requests
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
        found = plan.local_positions(dummies + 18, dummies + 22) - dummies
        assert found.tolist() == [18, 19, 22, 23]


@pytest.mark.parametrize(
    ("options", "link", "shift"),
    [
        ({}, "hypic", 20),
        ({}, "epic-0", 16),  # behind four dummies
        ({}, "seam-5-2+6", 14),  # behind six tokens of the leading segment
        ({"context": "lead"}, "hypic", 0),  # behind all of it
    ],
)
def test_records_are_moved_from_where_they_were_made(options: dict[str, str], link: str, shift: int) -> None:
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
    assert on.begin_pass().segment_requests == []


def test_counters() -> None:
    """Logical prompt tokens: what seams compute twice is counted as seam, not again."""
    on = side()
    tokens = [IDS.sep, *DOCUMENT, IDS.sep, *QUERY]
    ((job, _),) = pumped(on, tokens)
    end(on, job)
    admit(on, tokens, "warm")
    assert on.begin_pass().segment_requests == []
    counters = on.take_counters()
    assert (counters.segments_queried, counters.segments_hit, counters.segments_computed) == (2, 1, 1)
    assert counters.tokens_reused == 34 and counters.seam_tokens == 12
    assert counters.tokens_computed == 42 + 42 - 34
    assert on.take_counters() == counters.levels(), "nothing has happened since"


def test_local_positions_without_padding_are_indices() -> None:
    found = CapturePlan(3, 9, 0, np.arange(6), None, leading=False).local_positions(4, 7)
    assert found.tolist() == [4, 5, 6]


# -- behind a context


TEXT = tuple(range(500, 512))


def with_text(**options: Any) -> SchedulerConnector:
    return side(context="text", text=TEXT, **options)


def computing(on: SchedulerConnector) -> dict[int, SegmentRequest]:
    """New segment requests by their first tokens: of the context, the leading segment, the document."""
    requests = on.begin_pass().segment_requests
    found = {request.token_ids[0]: request for request in requests}
    assert len(found) == len(requests)
    return found


def started(on: SchedulerConnector, name: str = "r", tokens: list[int] = PROMPT) -> dict[int, SegmentRequest]:
    admit(on, tokens, name)
    return computing(on)


def test_a_segment_waits_for_its_context_and_reads_it() -> None:
    on = with_text()
    found = started(on)
    context, lead, segment = found[TEXT[0]], found[LEAD[0]], found[DOCUMENT[0]]
    assert context.token_ids == list(TEXT) and segment.token_ids == DOCUMENT[:-3]
    assert (context.waits, lead.waits, segment.waits) == (False, False, True)
    assert on.ready(context.request_id) and on.ready(lead.request_id) and not on.ready(segment.request_id)
    end(on, context)
    assert on.ready(segment.request_id) and not on.ready("r")

    plan, [capture] = on.views.stream_plan(segment.request_id), on.views.captures(segment.request_id)
    assert plan is not None and capture.has_context
    assert on.views.stream_plan(lead.request_id) is None
    (point,) = plan.points
    assert (point.at, point.columns, point.replace_state) == (0, len(TEXT), True)
    assert plan.kv_positions.tolist() == list(range(len(TEXT)))
    expected = list(range(len(TEXT), len(TEXT) + len(DOCUMENT) - 3))
    assert plan.positions.tolist() == expected
    assert capture.positions is not None and capture.positions.tolist() == expected
    assert (capture.lo, capture.hi) == (3, len(DOCUMENT) - 3), "indices of the request's own tokens"
    end(on, lead, segment)
    assert on.ready("r")


def test_a_context_is_computed_once_for_all_prompts() -> None:
    on = with_text()
    end(on, *started(on).values())
    other = started(on, "other", [*LEAD[5:], IDS.sep, *DOCUMENT[::-1], IDS.sep, *QUERY])
    assert other.keys() == {LEAD[5], DOCUMENT[-1]}
    assert on.ready(other[DOCUMENT[-1]].request_id), "its context is here"
    assert started(on, "warm") == {} and on.hits("warm").total() == len(LEAD) + len(DOCUMENT) - 6


def test_the_prompts_own_leading_segment_as_context() -> None:
    on = side(context="lead")
    lead, segment = started(on).values()
    assert not on.ready(segment.request_id)
    end(on, lead)
    assert on.ready(segment.request_id)


def context_key(on: SchedulerConnector) -> SegmentKey:
    [key] = {w.context.key for w in on.segment_requests._segments.values() if w.context is not None}
    return key


def test_a_context_is_held_until_the_segment_behind_it_ends() -> None:
    on = with_text()
    found = started(on)
    end(on, found[TEXT[0]])
    key = context_key(on)
    on.finished("r", completed=False)  # whoever asked is gone
    on.directory.drop_unpinned()
    assert on.directory.lookup(key) is Lookup.HIT and on.ready(found[DOCUMENT[0]].request_id)
    for first in (LEAD[0], DOCUMENT[0]):
        end(on, found[first])
    assert on.directory.pinned == 0


def test_a_record_that_left_before_its_order_went_out_is_not_copied() -> None:
    """By the time of the copy, another record may be in its place."""
    on = side()
    found = started(on)
    end(on, *found.values())
    on.finished("r", completed=False)
    step(on)
    gone, stays = on.directory.resident()[:2]
    for entry in (gone, stays):
        on._orders.submit(SaveRecord(on._view.place(entry, Role.INTERIOR)))
        on._orders.submit(PushRecord(entry.serial, on._view.place(entry, Role.INTERIOR), "tcp://there", 1.0))
    on.directory.discard(gone.key)
    orders = [order for order in step(on) if isinstance(order, SaveRecord | PushRecord)]
    assert [order.place.key for order in orders] == [stays.key, stays.key]


def test_the_requesters_of_a_segment_request_hold_its_record() -> None:
    on = side()
    found = started(on)
    jobs = [job.request_id for job in found.values()]
    assert on.requesters_of(jobs) == {"r"} and on.requesters_of(["r", "nobody"]) == set()


def test_a_context_that_fails_is_computed_again_for_whoever_waits() -> None:
    on = with_text()
    found = started(on)
    key, segment = context_key(on), found[DOCUMENT[0]].request_id
    on.finished("r", completed=False)
    on.finished(found[TEXT[0]].request_id, completed=False)
    [again] = on.begin_pass().segment_requests
    assert again.token_ids == list(TEXT) and again.for_request == segment
    assert not on.ready(segment)
    end(on, again)
    assert on.ready(segment) and on.directory.lookup(key) is Lookup.HIT


def test_a_segment_that_fails_is_computed_again_behind_its_context() -> None:
    on = with_text()
    found = started(on)
    end(on, found[TEXT[0]])
    on.finished(found[DOCUMENT[0]].request_id, completed=False)
    [again] = on.begin_pass().segment_requests
    assert again.token_ids == DOCUMENT[:-3] and again.waits and on.ready(again.request_id)
    end(on, again, found[LEAD[0]])
    assert on.ready("r")
    end(on, "r")
    assert on.directory.pinned == 0


def test_a_context_that_is_deleted_serves_those_who_hold_it() -> None:
    """The segment behind it fails and is computed again, behind the same record; others get another."""
    on = with_text()
    found = started(on)
    key = context_key(on)
    on.retention.drop_record(key)
    later = started(on, "later")
    assert list(later) == [TEXT[0]], "a new context; what is under way is shared"
    end(on, found[TEXT[0]])
    assert on.ready(found[DOCUMENT[0]].request_id) and on.directory.lookup(key) is Lookup.PENDING
    on.finished(found[DOCUMENT[0]].request_id, completed=False)
    [again] = on.begin_pass().segment_requests
    assert again.for_request == "r" and on.ready(again.request_id)
    end(on, again, found[LEAD[0]])
    assert on.ready("r") and not on.ready("later")
    end(on, later[TEXT[0]])
    assert on.ready("later")
    end(on, "r", "later")
    assert (on.directory.pinned, len(on.directory)) == (0, 3)


def test_a_context_hurries_for_who_waits_for_a_segment_that_the_store_did_not_have() -> None:
    """An urgent request found the segment on its way.  It is computed behind the first one's context, which
    was deleted: the urgent request's own is another."""
    on = with_text(store=STORE)
    plan = on.plan(PlanRequest(PROMPT, on.spec(None, len(PROMPT)), None, None))
    assert plan is not None
    on.admit("patient", plan, priority=5)
    assert on.begin_pass().segment_requests == []
    context, lead, segment = (place.serial for place in fetched(step(on)))
    say(on, taken=(lead,), missed=(context,))
    (first,) = on.begin_pass().segment_requests
    on.retention.drop_record(plan.contexts[0].key)
    on.admit("urgent", plan, priority=1)
    assert on.begin_pass() == PassStart([], {}, {})
    say(on, missed=(segment,))
    start = on.begin_pass()
    (behind,) = start.segment_requests
    assert (first.priority, behind.priority) == (5, 1) and start.raised == {first.request_id: 1}


OTHER = list(range(200, 240))


def prompt_of(*documents: list[int], lead: list[int] | None = None) -> list[int]:
    return [*(lead or []), *(t for d in documents for t in (IDS.sep, *d)), IDS.sep, *QUERY]


def test_what_nobody_else_wants_is_unwanted_once() -> None:
    on = side()
    admit(on, prompt_of(DOCUMENT, OTHER), "one")
    admit(on, prompt_of(DOCUMENT), "two")
    jobs = computing(on)
    assert len(jobs) == 2 and on.take_unwanted() == []
    end(on, "one", completed=False)
    assert on.take_unwanted() == [jobs[OTHER[0]].request_id], "the other one is waited for"
    assert on.take_unwanted() == []
    end(on, jobs[OTHER[0]], "two", completed=False)
    assert on.take_unwanted() == [jobs[DOCUMENT[0]].request_id]
    end(on, jobs[DOCUMENT[0]], completed=False)
    assert len(on.directory) == 0 and on.begin_pass().segment_requests == []


def test_a_request_that_has_no_room_yet_waits_for_it_too() -> None:
    """It joins once it has room; while it is away, what it waits for is unwanted."""
    many = [[1100 + 40 * i + j for j in range(40)] for i in range(7)]
    on = side()
    admit(on, prompt_of(*many, DOCUMENT), "one")
    jobs = computing(on)
    admit(on, prompt_of(DOCUMENT, OTHER), "two")
    assert len(jobs) == 8
    assert on.begin_pass().segment_requests == [], "there is no room for the second's other record"
    end(on, "one", completed=False)
    unwanted = on.take_unwanted()
    assert sorted(unwanted) == sorted(j.request_id for token, j in jobs.items() if token != DOCUMENT[0])
    end(on, *unwanted, "two", completed=False)
    assert on.take_unwanted() == [jobs[DOCUMENT[0]].request_id]


def test_a_context_goes_with_the_last_that_is_computed_behind_it() -> None:
    on = side()
    admit(on, prompt_of(DOCUMENT, lead=LEAD), "one", hypic_context="lead")
    jobs = computing(on)
    assert jobs.keys() == {LEAD[0], DOCUMENT[0]}
    end(on, "one", completed=False)
    assert on.take_unwanted() == [jobs[DOCUMENT[0]].request_id], "the context is still waited for"
    end(on, jobs[DOCUMENT[0]], completed=False)
    assert on.take_unwanted() == [jobs[LEAD[0]].request_id]
    end(on, jobs[LEAD[0]], completed=False)
    assert len(on.directory) == 0


def test_what_is_there_or_was_never_computed_is_nobodys() -> None:
    on = side()
    admit(on, prompt_of(DOCUMENT), "one")
    (job,) = computing(on).values()
    end(on, job)
    admit(on, prompt_of(OTHER), "two")  # pinned by no step yet
    end(on, "one", "two", completed=False)
    assert on.take_unwanted() == [] and on.begin_pass().segment_requests == []
