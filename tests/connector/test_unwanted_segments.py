"""Segment requests whose records nobody waits for any more, as requests that wanted them end early."""

from __future__ import annotations

from vllm_hypic.connector.scheduler.side import SchedulerSide

from .test_scheduler_side import DOCUMENT, IDS, LEAD, QUERY, admit, side

OTHER = list(range(200, 240))


def prompt(*documents: list[int], lead: list[int] | None = None) -> list[int]:
    return [*(lead or []), *(t for d in documents for t in (IDS.sep, *d)), IDS.sep, *QUERY]


def started(on: SchedulerSide) -> dict[int, str]:
    """Segment requests by the first token that they compute."""
    return {job.token_ids[0]: job.request_id for job in on.pump()}


def end(on: SchedulerSide, *names: str) -> None:
    for name in names:
        on.finished(name, completed=False)


def test_what_nobody_else_wants_is_unwanted_once() -> None:
    on = side()
    admit(on, prompt(DOCUMENT, OTHER), "one")
    admit(on, prompt(DOCUMENT), "two")
    jobs = started(on)
    assert len(jobs) == 2 and on.take_unwanted() == []
    end(on, "one")
    assert on.take_unwanted() == [jobs[OTHER[0]]], "the other one is waited for"
    assert on.take_unwanted() == []
    end(on, jobs[OTHER[0]], "two")
    assert on.take_unwanted() == [jobs[DOCUMENT[0]]]
    end(on, jobs[DOCUMENT[0]])
    on.directory.check_integrity()
    assert len(on.directory) == 0 and on.pump() == []


def test_a_request_that_has_no_room_yet_waits_for_it_too() -> None:
    """It joins once it has room; while it is away, what it waits for is unwanted."""
    many = [[1100 + 40 * i + j for j in range(40)] for i in range(6)]
    on = side()  # 64 pages, 9 a record
    admit(on, prompt(*many, DOCUMENT), "one")
    jobs = started(on)
    admit(on, prompt(DOCUMENT, OTHER), "two")
    assert len(jobs) == 7 and on.pump() == [], "there is no room for the second's other record"
    end(on, "one")
    unwanted = on.take_unwanted()
    assert sorted(unwanted) == sorted(j for token, j in jobs.items() if token != DOCUMENT[0])
    end(on, *unwanted, "two")
    assert on.take_unwanted() == [jobs[DOCUMENT[0]]]


def test_a_context_goes_with_the_last_that_is_computed_behind_it() -> None:
    on = side()
    admit(on, prompt(DOCUMENT, lead=LEAD), "one", hypic_context="lead")
    jobs = started(on)
    assert jobs.keys() == {LEAD[0], DOCUMENT[0]}
    end(on, "one")
    assert on.take_unwanted() == [jobs[DOCUMENT[0]]], "the context is still waited for"
    end(on, jobs[DOCUMENT[0]])
    assert on.take_unwanted() == [jobs[LEAD[0]]]
    end(on, jobs[LEAD[0]])
    on.directory.check_integrity()
    assert len(on.directory) == 0


def test_what_is_there_or_was_never_computed_is_nobodys() -> None:
    on = side()
    admit(on, prompt(DOCUMENT), "one")
    (job,) = started(on).values()
    on.finished(job, completed=True)
    admit(on, prompt(OTHER), "two")  # pinned by no step yet
    end(on, "one", "two")
    assert on.take_unwanted() == [] and on.pump() == []
