"""Segment requests: computed once, shared, chunked, evicted, recomputed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from lib.oracle.models import random_segments

from .engines import (
    Answer,
    Ask,
    Engine,
    answer_of,
    begin,
    distance,
    drain,
    generate,
    largest_distance,
    prompt,
    run_to_end,
    same,
    scheduler_of,
    worker_of,
)

A, B, C, D = random_segments([200, 300, 250, 280], seed=31)
(QUERY,) = random_segments([40], seed=32)
(LONG,), (HUGE,) = random_segments([700], seed=33), random_segments([1000], seed=34)


@dataclass(frozen=True)
class Pool:
    """The scheduler side's books: records from the least to the most recently used."""

    keys: list[str]
    used_pages: int
    jobs: int
    """Segment requests started since the engine began."""


def pool(llm: Any) -> Pool:
    side = scheduler_of(llm).hypic
    directory = side.directory
    directory.check_integrity()
    keys = [side.namespace.renamed(e.key) for e in directory.resident()]
    return Pool(keys, directory.used.pages, side.segment_requests.started)


def records(llm: Any) -> dict[str, dict[str, np.ndarray]]:
    """Every resident record's tensors, float32, from the pool; by first keys."""
    side, device = scheduler_of(llm).hypic, worker_of(llm).runtime.pool
    found = {}
    for key, entry in side.directory._entries.items():
        rows = side._view.slot_mapping(entry)
        tensors = {}
        for layer, kv in device.kv.items():
            tensors |= {f"{layer} K": kv.key[rows], f"{layer} V": kv.value[rows]}
        for layer, linear in device.linear.items():
            tensors |= {f"{layer} T": linear.transition(entry.slot), f"{layer} S": linear.state[entry.slot]}
            tensors[f"{layer} conv"] = linear.conv_tail[entry.slot]
        found[side.namespace.renamed(key)] = {name: x.float().numpy() for name, x in tensors.items()}
    return found


def composed(*segments: list[int], lead: list[int] | None = None, **changes: Any) -> Ask:
    return Ask(prompt(*segments, query=QUERY, lead=lead or []), **changes)


def test_concurrent_requests_compute_each_segment_once_and_share_its_pages(hypic: Engine) -> None:
    asks = [composed(A, B, C), composed(C, A, B), composed(B, C), composed(A, A, B)]
    start = hypic.call(pool)
    answers = hypic.ask(*asks)
    end = hypic.call(pool)
    assert end.jobs - start.jobs == 3, "three documents, whatever the number of requests"
    assert len(end.keys) == 3
    pages = sum(-(-(len(x) - 16) // 32) for x in (A, B, C))
    assert end.used_pages == pages, f"{end.used_pages} pages hold three records of {pages} pages"
    assert [a.cached for a in answers[:1]] == [0], "the first had everything computed"
    warm = hypic.ask_one_by_one(*asks)
    assert hypic.call(pool).jobs == end.jobs
    assert largest_distance(answers, warm) <= 0.3


def test_samples_of_one_request_share_its_records(hypic: Engine) -> None:
    start = hypic.call(pool)
    (answer,) = hypic.ask(composed(A, B, sampling={"n": 3, "temperature": 1.0}))
    assert hypic.call(pool).jobs - start.jobs == 2 and len(answer.samples) == 3
    # Each reports the likeliest tokens and the one that it drew.
    first = [sample[0] for sample in answer.logprobs]
    common = first[0].keys() & first[1].keys() & first[2].keys()
    assert len(common) >= 20
    assert all(f[token] == first[0][token] for f in first for token in common)


@pytest.mark.parametrize("kind", ["tight", "overlapped"])
@pytest.mark.parametrize("where", ["leading", "interior"])
def test_chunked_segments_have_the_records_of_whole_ones(hypic: Engine, where: str, chosen: Engine) -> None:
    """The small engines prefill 256 tokens at a time, ``hypic`` whole segments.  Another request takes a few
    of these, so that chunks end inside blocks: stock does not let them where it caches prefixes."""
    ask = composed(LONG) if where == "interior" else composed(A, lead=LONG)
    (whole,), (_, chunked) = hypic.ask(ask), chosen.ask(Ask(tuple(B[:100]), 3), ask)
    one, other = hypic.call(records), chosen.call(records)
    assert one.keys() == other.keys() and one
    for key in one:
        for name, expected in one[key].items():
            if where == "leading" and name.endswith(" T"):
                continue  # a leading record has none
            error = np.linalg.norm(other[key][name] - expected) / np.linalg.norm(expected)
            assert error < 2e-2, f"{name} of {key[:8]}: relative error {error}"
    assert distance(whole, chunked) < 0.2


# -- steps -------------------------------------------------------------------------------------------


@contextmanager
def passes_of(llm: Any) -> Iterator[list[dict[str, int]]]:
    """Collects, of each pass that has work meanwhile, how many tokens of every request are in it."""
    scheduler, found = scheduler_of(llm), list[dict[str, int]]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = type(scheduler).schedule(scheduler, *args, **kwargs)
        found.extend([dict(output.num_scheduled_tokens)] if output.total_num_scheduled_tokens else [])
        return output

    scheduler.schedule = schedule
    try:
        yield found
    finally:
        del scheduler.schedule


def passes(llm: Any, asks: list[Ask]) -> tuple[list[list[int]], list[Answer]]:
    """The answers, and of each pass how many tokens of every request it had."""
    with passes_of(llm) as found:
        answers = generate(llm, asks)
    return [list(tokens.values()) for tokens in found], answers


def steps(llm: Any, ask: Ask) -> list[tuple[int, int]]:
    """Run ``ask``; (tokens of segment requests, other tokens) of every step that had work."""
    with passes_of(llm) as found:
        name = begin(llm, "watched", ask)
        run_to_end(llm, "watched")
    client = [tokens.pop(name, 0) for tokens in found]
    return [(sum(tokens.values()), n) for tokens, n in zip(found, client, strict=True)]


def test_cold_request_takes_two_steps(hypic: Engine) -> None:
    """All its segments in one, although two are longer than a block of the prefix cache; then its stream."""
    segments = (A, B, C, D)
    ask = composed(*segments, max_tokens=1)
    stream = 16 * len(segments) + len(QUERY)
    assert hypic.call(steps, ask) == [(sum(len(s) - 8 for s in segments), 0), (0, stream)]
    assert hypic.call(steps, ask) == [(0, stream)]


@pytest.mark.parametrize("kind", ["tight", "overlapped"])
def test_segments_beyond_the_budget_waste_no_step(chosen: Engine) -> None:
    """Every step but the last is full, and the stream follows at once."""
    ask = composed(LONG, A, max_tokens=1)
    whole, rest = divmod(sum(len(s) - 8 for s in (LONG, A)), 256)
    assert chosen.call(steps, ask) == [(256, 0)] * whole + [(rest, 0), (0, 2 * 16 + len(QUERY))]


def cached_blocks(llm: Any) -> int:
    return len(scheduler_of(llm).kv_cache_manager.block_pool.cached_block_hash_to_block)


def test_segment_requests_leave_nothing_in_the_prefix_cache(hypic: Engine) -> None:
    """Their blocks are found by nobody; kept, they would push out what others use."""
    hypic.ask(composed(A, B, C, max_tokens=1))
    assert hypic.call(cached_blocks) == 0
    hypic.ask(Ask(tuple(LONG), 1))
    assert hypic.call(cached_blocks) > 0, "ordinary prompts are kept"


def test_segment_longer_than_the_pool_is_computed_in_the_stream(tight: Engine, hypic: Engine) -> None:
    """Its tokens are exact then: nothing is cached, and a prompt of it alone is an ordinary prompt."""
    start = tight.call(pool)
    answer, plain = tight.ask_one_by_one(composed(HUGE), composed(HUGE).plain())
    assert tight.call(pool).jobs == start.jobs
    assert answer == plain
    # Beside it, segments that fit are cached as usual.
    tight.ask(composed(HUGE, A))
    assert tight.call(pool).jobs == start.jobs + 1


def test_more_segments_than_the_pool_holds(tight: Engine) -> None:
    """The first three come from records, the fourth is computed in the stream: the request never waits."""
    start = tight.call(pool)
    (cold,) = tight.ask(composed(A, B, C, D))
    (warm,) = tight.ask(composed(A, B, C, D))
    assert tight.call(pool).jobs == start.jobs + 3
    assert warm.cached == sum(len(x) - 16 for x in (A, B, C))
    assert cold.logprobs == warm.logprobs


def test_least_recently_used_records_go_first_and_come_back_bit_by_bit(tight: Engine) -> None:
    tight.ask_one_by_one(composed(A), composed(B), composed(C))
    a, b, c = tight.call(pool).keys
    first = tight.call(records)
    tight.ask_one_by_one(composed(A), composed(D))
    kept = tight.call(pool)
    assert b not in kept.keys and kept.keys[:2] == [c, a], "B was the least recently used"
    tight.ask_one_by_one(composed(B))
    again = tight.call(pool)
    assert c not in again.keys and again.jobs == kept.jobs + 1
    for name, tensor in tight.call(records)[b].items():
        assert np.array_equal(tensor, first[b][name]), f"{name} changed when B was computed again"


def kill_segment(llm: Any, ask: Ask, times: int) -> tuple[Any, int]:
    """Start ``ask``; end its segment request in mid-prefill, ``times`` times; returns (answer, kills)."""
    begin(llm, "killed", ask)
    kills, answers = 0, list[Any]()
    for _ in range(300):
        answers += [answer_of(output) for output in llm.llm_engine.step() if output.finished]
        if answers:
            break
        if kills < times and (under_way := segments_under_way(llm)) and under_way[0].num_computed_tokens:
            kill(llm, under_way[0])
            kills += 1
    drain(llm)
    return answers[0], kills


def segments_under_way(llm: Any) -> list[Any]:
    scheduler = scheduler_of(llm)
    return [r for r in scheduler.running if scheduler.hypic.is_internal(r.request_id)]


def kill(llm: Any, request: Any) -> None:
    from vllm.v1.request import RequestStatus

    scheduler_of(llm).finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def test_killed_segment_request_is_started_again(tight: Engine) -> None:
    ask = composed(LONG)
    (expected,) = tight.ask(ask)
    tight.reset()
    start = tight.call(pool)
    answer, kills = tight.call(kill_segment, ask, 2, timeout=60.0)
    assert kills == 2
    assert tight.call(pool).jobs == start.jobs + 3
    assert answer.logprobs == expected.logprobs


def refuse_segment(llm: Any, ask: Ask) -> tuple[str | None, bool]:
    """Start ``ask`` and have its segment request refused, as vLLM does for an image that its encoder's cache
    has in another size.  Return why the request ended, and whether a segment request is left."""
    name = begin(llm, "refused", ask)
    refused = False
    while True:
        for output in llm.llm_engine.step():
            if output.finished:
                scheduler = scheduler_of(llm)
                left = any(scheduler.hypic.is_internal(r) for r in scheduler.requests)
                return output.outputs[0].finish_reason, left or name in scheduler.requests
        if not refused and (under_way := segments_under_way(llm)):
            scheduler_of(llm).encoder_cache_mismatch_reqs.add(under_way[0].request_id)
            refused = True


def test_a_request_ends_with_the_error_of_its_segment(tight: Engine) -> None:
    tight.reset()
    assert tight.call(refuse_segment, composed(LONG), timeout=60.0) == ("error", False)


def start_and_reset(llm: Any, ask: Ask) -> Any:
    """Reset the pool while a request holds records; returns its answer."""
    begin(llm, "held", ask)
    for _ in range(3):
        llm.llm_engine.step()
    assert scheduler_of(llm).reset_connector_cache()
    return answer_of(run_to_end(llm, "held"))


def test_reset_empties_the_pool_but_for_records_that_requests_hold(hypic: Engine) -> None:
    ask = composed(A, B)
    (expected,) = hypic.ask(ask)
    assert hypic.call(pool).used_pages
    hypic.reset()
    assert hypic.call(pool).keys == [] and hypic.call(pool).used_pages == 0
    (again,) = hypic.ask(ask)
    assert same(again, expected)
    assert hypic.call(start_and_reset, ask).logprobs == expected.logprobs
    assert not hypic.call(pool).used_pages, "nobody can find them any more"


def abandon(llm: Any, ask: Ask, kills: bool) -> bool:
    """The only client leaves; then the segment request may be ended in mid-prefill.  Returns whether it was
    there."""
    name = begin(llm, "abandoned", ask)
    llm.llm_engine.step()
    llm.llm_engine.abort_request([name], internal=True)
    under_way = segments_under_way(llm)
    for request in under_way if kills else ():
        kill(llm, request)
    drain(llm)
    return bool(under_way)


def test_half_computed_record_that_nobody_wants_is_freed(tight: Engine) -> None:
    assert tight.call(abandon, composed(LONG), True)
    left = tight.call(pool)
    assert left.keys == [] and left.used_pages == 0


def test_segment_of_a_client_that_left_is_kept_for_the_next(tight: Engine) -> None:
    tight.call(abandon, composed(LONG), False)
    jobs = tight.call(pool).jobs
    (answer,) = tight.ask(composed(LONG))
    assert answer.cached == len(LONG) - 16 and tight.call(pool).jobs == jobs


@pytest.mark.parametrize("kind", ["hypic", "overlapped"])
def test_warm_up_prompt_computes_records_and_generates_nothing(chosen: Engine) -> None:
    ask = Ask((*prompt(A, query=[]), *prompt(B, query=[])))
    for _ in range(2):  # cold, then with every record there: nothing at all to compute
        (warm,) = chosen.ask(ask)
        assert warm.samples == ((),) and warm.reasons == ("stop",)
        assert len(chosen.call(pool).keys) == 2
    (answer,) = chosen.ask(composed(B, A))
    assert answer.cached == len(A) + len(B) - 32
