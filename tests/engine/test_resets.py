"""Caches reset while requests live: these end as they would have, and later ones meet nothing of before."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.oracle.models import random_segments, save_hybrid_model

from .conftest import EngineFactory, Saver
from .engines import (
    Answer,
    Ask,
    Engine,
    EngineError,
    all_same,
    answer_of,
    begin,
    largest_distance,
    prompt,
    same,
    scheduler_of,
    store_of,
)

LEAD, ONE, TWO, LONG, QUERY = random_segments([90, 150, 200, 700, 40], seed=71)
OPTIONS = {"store": {"tiers": [{"type": "memory", "bytes": 64 << 20}]}}
ARGS = {"max_num_batched_tokens": 256, "max_num_seqs": 8}


def ask(*documents: list[int], max_tokens: int = 8) -> Ask:
    return Ask(prompt(*documents, query=QUERY, lead=LEAD), max_tokens)


LIVE = (ask(ONE, max_tokens=24), ask(LONG), ask(LONG, TWO))
"""Requests that a reset meets."""


@dataclass(frozen=True)
class Reset:
    """What a reset amid requests left; ``answers`` of those that were there before, in their order."""

    succeeded: bool
    answers: list[Answer]
    phases: list[str]
    """In which the reset met each of them."""


def reset_amid(
    llm: Any, decoding: Ask, computing: Ask, waiting: Ask, later: Ask | None = None, factor: float = 1.0
) -> Reset:
    """Reset while one request decodes, a second one's segment is half computed, a third one waits for the
    same segment.  Then weights are scaled by ``factor``, and ``later`` comes."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    names, answers = list[str](), {}

    def add(one: Ask) -> str:
        names.append(begin(llm, f"reset-{len(names)}", one))
        return names[-1]

    def step_until(met: Any) -> None:
        for _ in range(500):
            if met():
                return
            answers.update({one.request_id: answer_of(one) for one in engine.step() if one.finished})
        raise RuntimeError(f"hangs: {list(scheduler.requests)}")

    decodes = add(decoding)
    step_until(lambda: scheduler.requests[decodes].num_output_tokens)
    add(computing)
    step_until(lambda: half_computed(scheduler))
    add(waiting)
    phases = [phase_of(scheduler, name) for name in names]
    succeeded = llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    change_weights(llm, factor)
    if later is not None:
        add(later)
    step_until(lambda: len(answers) == len(names))
    return Reset(bool(succeeded), [answers[external] for external in sorted(answers)], phases)


def half_computed(scheduler: Any) -> bool:
    """Whether some segment is."""
    return any(
        0 < r.num_computed_tokens < r.num_prompt_tokens and scheduler.hypic.is_internal(r.request_id)
        for r in scheduler.running
    )


def phase_of(scheduler: Any, request_id: str) -> str:
    if scheduler.requests[request_id].num_output_tokens:
        return "decode"
    return "waiting for records" if not scheduler.hypic.resident(request_id) else "prefill"


def scale(worker: Any, factor: float) -> None:
    """Weights changed in place, as a trainer does; by a power of two, so that it can be undone."""
    with torch.no_grad():
        for name, weight in worker.model_runner.model.named_parameters():
            if "lm_head" not in name and weight.dim() == 2:
                weight.mul_(factor)


def change_weights(llm: Any, factor: float) -> None:
    llm.collective_rpc(scale, args=(factor,))


def stored(llm: Any) -> set[str]:
    assert store_of(llm).drain(30)
    return {name.partition(".")[0] for name in store_of(llm)._tiers[0].tier._objects}


def resident(llm: Any) -> set[str]:
    return {entry.key for entry in scheduler_of(llm).hypic.directory.resident()}


@pytest.fixture(scope="module")
def _engine(module_engine: EngineFactory, hybrid_model: Any) -> Engine:
    return module_engine(hybrid_model, options=OPTIONS, **ARGS)


def test_requests_that_live_end_on_their_records_and_later_ones_get_new_ones(engine: Engine) -> None:
    alone = engine.ask_one_by_one(*LIVE)
    engine.reset()
    found = engine.call(reset_amid, *LIVE, ask(ONE, TWO))
    assert found.succeeded, "vLLM takes this for a failure, and a paused engine stays paused"
    assert found.phases == ["decode", "waiting for records", "waiting for records"]
    assert largest_distance(found.answers[:3], alone) <= 0.3, "an answer changed"
    assert [a.tokens[0] for a in found.answers[:3]] == [a.tokens[0] for a in alone]
    assert found.answers[3].cached == 0, "it read a record of before"
    left = engine.call(resident)
    assert len(left) == 3 and engine.call(stored) == left, "nothing but the later one's records is anywhere"
    (again,) = engine.ask(ask(ONE, TWO))
    assert again.cached == found.answers[3].cached + len(LEAD) + len(ONE) + len(TWO) - 32


def test_after_new_weights_answers_are_those_of_an_engine_that_never_had_others(
    engine: Engine, start_engine: EngineFactory, hybrid_model: Any
) -> None:
    asks = [ask(ONE, TWO), ask(TWO, LONG), ask(LONG, ONE)]
    before = engine.ask_one_by_one(*asks)
    fresh = start_engine(hybrid_model, options=OPTIONS, **ARGS)
    fresh.call(change_weights, 0.5)
    expected = fresh.ask_one_by_one(*asks)
    assert not any(map(same, before, expected))
    engine.reset()
    try:
        engine.call(reset_amid, *LIVE, None, 0.5)
        cold, warm = engine.ask_one_by_one(*asks), engine.ask_one_by_one(*asks)
    finally:
        engine.call(change_weights, 2.0)
    check_new(cold, warm, expected)


def check_new(cold: list[Answer], warm: list[Answer], expected: list[Answer]) -> None:
    assert all_same(cold, warm, expected), "a record of the old weights was read"
    assert [a.cached for a in cold] == [a.cached for a in expected] and all(a.cached for a in warm)


def reload(llm: Any, model: str) -> None:
    """Weights from other files, without a word to the caches."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": model})


def call_workers(llm: Any, method: str) -> None:
    llm.collective_rpc(method)


def test_records_are_forgotten_where_weights_are_reloaded(
    engine: Engine, start_engine: EngineFactory, hybrid_model: Path, saved: Saver
) -> None:
    other = saved(partial(save_hybrid_model, tie=False, seed=5))
    asks = [ask(ONE, TWO), ask(TWO, LONG)]
    before = engine.ask_one_by_one(*asks)
    expected = start_engine(other, options=OPTIONS, **ARGS).ask_one_by_one(*asks)
    assert not any(map(same, before, expected))
    old = engine.call(resident) | engine.call(stored)
    try:
        engine.call(reload, str(other))
        assert not engine.call(resident)
        cold, warm = engine.ask_one_by_one(*asks), engine.ask_one_by_one(*asks)
        assert not engine.call(stored) & old
    finally:
        engine.call(reload, str(hybrid_model))
    check_new(cold, warm, expected)
    assert not engine.call(resident)
    assert all_same(engine.ask_one_by_one(*asks), before), "the old weights are back"


def test_calls_of_workers_that_may_change_weights(engine: Engine) -> None:
    """A call that failed may have changed some; one that cannot change any leaves records alone."""
    engine.ask(ask(ONE, TWO))
    kept = engine.call(resident)
    engine.call(call_workers, "hypic_calls")
    assert engine.call(resident) == kept
    with pytest.raises(EngineError, match="Weight transfer not configured"):
        engine.call(call_workers, "start_weight_update")
    assert not engine.call(resident)
    (answer,) = engine.ask(ask(ONE, TWO))
    assert answer.cached == 0


def test_reset_between_overlapping_steps(overlapped: Engine) -> None:
    """vLLM refuses it where blocks of a running request are given back late, as connectors may need."""
    alone = overlapped.ask_one_by_one(*LIVE)
    overlapped.reset()
    found = overlapped.call(reset_amid, *LIVE)
    assert found.succeeded and largest_distance(found.answers, alone) <= 0.3
    for one, other in zip(found.answers, alone, strict=True):
        assert len(one.tokens) == len(other.tokens) and one.tokens[0] == other.tokens[0]
