"""Segment requests behind a context, as the scheduler side starts, holds and ends them."""

from __future__ import annotations

from typing import Any

from vllm_hypic.connector.scheduler.entries import Lookup
from vllm_hypic.connector.scheduler.planning import PlanningTexts, PlanRequest
from vllm_hypic.connector.scheduler.segment_requests import SegmentRequest
from vllm_hypic.connector.scheduler.side import SchedulerSide
from vllm_hypic.primitives.keys import Namespace, SegmentKey

from .test_scheduler_side import DOCUMENT, IDS, LEAD, QUERY, admit, side
from .test_scheduler_store import STORE, fetched, say, step

TEXT = tuple(range(500, 512))
PROMPT = [*LEAD, IDS.sep, *DOCUMENT, IDS.sep, *QUERY]


def with_text(**options: Any) -> SchedulerSide:
    made = side(context="text", **options)
    return SchedulerSide(
        made.config,
        made.geometry,
        Namespace.from_config({}),
        4096,
        lambda: IDS,
        texts=PlanningTexts(context=lambda: TEXT),
    )


def started(on: SchedulerSide, name: str = "r", tokens: list[int] = PROMPT) -> list[SegmentRequest]:
    admit(on, tokens, name)
    return on.pump()


def by_tokens(requests: list[SegmentRequest]) -> dict[int, SegmentRequest]:
    """By first token: of the context, the leading segment, the document."""
    return {request.token_ids[0]: request for request in requests}


def test_a_segment_waits_for_its_context_and_reads_it() -> None:
    on = with_text()
    found = by_tokens(started(on))
    context, lead, segment = found[TEXT[0]], found[LEAD[0]], found[DOCUMENT[0]]
    assert context.token_ids == list(TEXT) and segment.token_ids == DOCUMENT[:-3]
    assert (context.waits, lead.waits, segment.waits) == (False, False, True)
    assert on.ready(context.request_id) and on.ready(lead.request_id) and not on.ready(segment.request_id)
    on.finished(context.request_id, completed=True)
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
    for request in (lead, segment):
        on.finished(request.request_id, completed=True)
    assert on.ready("r")


def test_a_context_is_computed_once_for_all_prompts() -> None:
    on = with_text()
    for request in started(on):
        on.finished(request.request_id, completed=True)
    other = started(on, "other", [*LEAD[5:], IDS.sep, *DOCUMENT[::-1], IDS.sep, *QUERY])
    assert sorted(r.token_ids[0] for r in other) == sorted([LEAD[5], DOCUMENT[-1]])
    assert on.ready(by_tokens(other)[DOCUMENT[-1]].request_id), "its context is here"
    assert started(on, "warm") == [] and on.hits("warm").total() == len(LEAD) + len(DOCUMENT) - 6


def test_the_prompts_own_leading_segment_as_context() -> None:
    on = side(context="lead")
    lead, segment = started(on)
    assert not on.ready(segment.request_id)
    on.finished(lead.request_id, completed=True)
    assert on.ready(segment.request_id)


def context_key(on: SchedulerSide) -> SegmentKey:
    [key] = {w.context.key for w in on.segment_requests._segments.values() if w.context is not None}
    return key


def test_a_context_is_held_until_the_segment_behind_it_ends() -> None:
    on = with_text()
    found = by_tokens(started(on))
    on.finished(found[TEXT[0]].request_id, completed=True)
    key = context_key(on)
    on.finished("r", completed=False)  # whoever asked is gone
    on.directory.drop_unpinned()
    assert on.directory.lookup(key) is Lookup.HIT and on.ready(found[DOCUMENT[0]].request_id)
    for first in (LEAD[0], DOCUMENT[0]):
        on.finished(found[first].request_id, completed=True)
    assert on.directory.pinned == 0
    on.directory.check_integrity()


def test_a_context_that_fails_is_computed_again_for_whoever_waits() -> None:
    on = with_text()
    found = by_tokens(started(on))
    key, segment = context_key(on), found[DOCUMENT[0]].request_id
    on.finished("r", completed=False)
    on.finished(found[TEXT[0]].request_id, completed=False)
    [again] = on.pump()
    assert again.token_ids == list(TEXT) and again.for_request == segment
    assert not on.ready(segment)
    on.finished(again.request_id, completed=True)
    assert on.ready(segment) and on.directory.lookup(key) is Lookup.HIT


def test_a_segment_that_fails_is_computed_again_behind_its_context() -> None:
    on = with_text()
    found = by_tokens(started(on))
    on.finished(found[TEXT[0]].request_id, completed=True)
    on.finished(found[DOCUMENT[0]].request_id, completed=False)
    [again] = on.pump()
    assert again.token_ids == DOCUMENT[:-3] and again.waits and on.ready(again.request_id)
    for request in (again, found[LEAD[0]]):
        on.finished(request.request_id, completed=True)
    assert on.ready("r")
    on.finished("r", completed=True)
    assert on.directory.pinned == 0


def test_a_context_that_is_deleted_serves_those_who_hold_it() -> None:
    """The segment behind it fails and is computed again, behind the same record; others get another."""
    on = with_text()
    found = by_tokens(started(on))
    key = context_key(on)
    on.retention.drop_record(key)
    later = by_tokens(started(on, "later"))
    assert list(later) == [TEXT[0]], "a new context; what is under way is shared"
    on.finished(found[TEXT[0]].request_id, completed=True)
    assert on.ready(found[DOCUMENT[0]].request_id) and on.directory.lookup(key) is Lookup.PENDING
    on.finished(found[DOCUMENT[0]].request_id, completed=False)
    [again] = on.pump()
    assert again.for_request == "r" and on.ready(again.request_id)
    for request in (again, found[LEAD[0]]):
        on.finished(request.request_id, completed=True)
    assert on.ready("r") and not on.ready("later")
    on.finished(later[TEXT[0]].request_id, completed=True)
    assert on.ready("later")
    for name in ("r", "later"):
        on.finished(name, completed=True)
    assert (on.directory.pinned, len(on.directory)) == (0, 3)
    on.directory.check_integrity()


def test_a_context_hurries_for_who_waits_for_a_segment_that_the_store_did_not_have() -> None:
    """An urgent request found the segment on its way.  It is computed behind the first one's context, which
    was deleted: the urgent request's own is another."""
    on = with_text(store=STORE)
    plan = on.planner.plan(PlanRequest(PROMPT, None, None, None))
    assert plan is not None
    on.admit("patient", plan, priority=5)
    assert on.pump() == []
    context, lead, segment = (place.serial for place in fetched(step(on)))
    say(on, taken=(lead,), missed=(context,))
    (first,) = on.pump()
    on.retention.drop_record(plan.contexts[0].key)
    on.admit("urgent", plan, priority=1)
    assert on.pump() == [] and on.admission.take_raised() == {}
    say(on, missed=(segment,))
    (behind,) = on.pump()
    assert (first.priority, behind.priority) == (5, 1) and on.admission.take_raised() == {first.request_id: 1}
