"""Requests that clients give up in every phase of their life leave nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from oracle.models import random_segments

from .engines import Ask, Engine, audit, drain, prompt, sampling_params, scheduler_of
from .test_concurrency import mixed_asks

MAX_STEPS = 3000
"""Several times what a storm takes."""

PHASES = ("waiting for records", "segment prefill", "stream prefill", "decode")


def phase_of(scheduler: Any, request_id: str) -> str | None:
    """Where a client's request stands, as the scheduler sees it between two steps."""
    request, side = scheduler.requests.get(request_id), scheduler.hypic
    if request is None:
        return None
    if not side.resident(request_id):
        wanted = side.admission.requests[request_id].wanted
        running = {r.request_id for r in scheduler.running if r.num_computed_tokens > 0}
        works = side.segment_requests._segments.items()
        computing = any(w.segment.key in wanted and r in running for r, w in works)
        return "segment prefill" if computing else "waiting for records"
    if request.num_output_tokens:
        return "decode"
    return "stream prefill" if 0 < request.num_computed_tokens < request.num_prompt_tokens else "other"


def storm(llm: Any, asks: list[Ask], seed: int) -> dict[str, int]:
    """Run ``asks``, arriving at random; three of four are aborted in a phase drawn beforehand.

    Returns how many were aborted in each phase and how many finished.
    """
    rng = random.Random(seed)
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    fates: dict[str, str | None] = {}
    counts: Counter[str] = Counter()
    waiting = list(enumerate(asks))
    for _ in range(MAX_STEPS):
        if not waiting and not engine.has_unfinished_requests():
            break
        for _ in range(rng.randrange(4)):
            if waiting:
                number, ask = waiting.pop(0)
                name = engine.add_request(
                    f"storm-{seed}-{number}", {"prompt_token_ids": list(ask.tokens)}, sampling_params(ask)
                )
                fates[name] = rng.choice(PHASES) if rng.random() < 0.75 else None
        counts["finished"] += sum(output.finished for output in engine.step())
        for name, fate in fates.items():
            if fate is not None and phase_of(scheduler, name) == fate and rng.random() < 0.5:
                engine.abort_request([name], internal=True)
                assert name not in scheduler.requests
                counts[fate] += 1
    else:
        raise RuntimeError(f"requests hang: {list(scheduler.requests)}")
    drain(llm)
    return dict(counts)


@pytest.mark.fast("overlapped")
@pytest.mark.parametrize("kind", ["tight", "overlapped"])
def test_aborts_at_random_moments_leave_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)
    asks = [Ask(a.tokens, a.max_tokens, a.extra) for seed in (5, 6) for a in mixed_asks(seed)]
    composed = [a for a in asks if a.tokens != a.plain().tokens]
    before = engine.ask_one_by_one(*composed[:3])
    engine.reset()
    start = engine.call(audit)

    counts: Counter[str] = Counter()
    for seed in range(2):
        counts += Counter(engine.call(storm, asks, seed))
        end = engine.call(audit)
        assert end.clean, f"after storm {seed}: {end}"
        assert end.free_blocks == start.free_blocks, f"after storm {seed}: {end}, before {start}"
    missed = [p for p in (*PHASES, "finished") if not counts[p]]
    assert not missed, f"no request was in {missed}: {dict(counts)}"

    engine.reset()
    assert engine.ask_one_by_one(*composed[:3]) == before, "answers changed"


def segments_left(llm: Any, gone: Ask, stays: Ask) -> tuple[dict[int, int], ...]:
    """Tokens computed by each segment request, by the segment's first token: before the client of ``gone``
    leaves, and a step later; and the records' first tokens once all is over (with nothing)."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    side = scheduler.hypic

    def found() -> dict[int, int]:
        segments = side.segment_requests._segments.items()
        return {w.segment.tokens[0]: scheduler.requests[r].num_computed_tokens for r, w in segments}

    def add(name: str, ask: Ask) -> str:
        return str(engine.add_request(name, {"prompt_token_ids": list(ask.tokens)}, sampling_params(ask)))

    leaves, _ = add("gone", gone), add("stays", stays)
    engine.step()
    works = side.segment_requests._segments.values()
    first_tokens = {w.segment.key: w.segment.tokens[0] for w in works}
    before = found()
    engine.abort_request([leaves], internal=True)
    engine.step()
    after = found()
    drain(llm)
    return before, after, {first_tokens[e.key]: 0 for e in side.directory.resident()}


def test_segments_of_an_aborted_request_that_nobody_else_wants_are_not_computed(tight: Engine) -> None:
    a, b, c = random_segments([320, 320, 320], seed=71)
    (query,) = random_segments([20], seed=72)
    before, after, records = tight.call(
        segments_left, Ask(prompt(a, b, c, query=query)), Ask(prompt(c, query=query))
    )
    assert before == {a[0]: 256, b[0]: 0, c[0]: 0}, "the first segment has begun"
    assert b[0] not in after and c[0] in after, "only the second one is waited for by nobody"
    assert records.keys() == {a[0], c[0]}, "what had begun is finished"
