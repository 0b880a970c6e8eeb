"""The plugin under vLLM's asynchronous scheduler, where step n + 1 is scheduled before step n is over."""

from __future__ import annotations

from typing import Any

from .engines import Ask, Engine, scheduler_of
from .test_concurrency import mixed_asks, noise


def schedulers(llm: Any) -> tuple[list[str], int | None]:
    core = llm.llm_engine.engine_core.engine_core
    names = [cls.__name__ for cls in type(scheduler_of(llm)).__mro__]
    return names, None if core.batch_queue is None else core.batch_queue.maxlen


def test_variant_follows_the_engine(hypic: Engine, overlapped: Engine) -> None:
    names, queue = hypic.call(schedulers)
    assert names[0] == "HypicSyncScheduler" and "AsyncScheduler" not in names and queue is None
    names, queue = overlapped.call(schedulers)
    assert names[0] == "HypicAsyncScheduler" and "AsyncScheduler" in names
    assert queue == 2, "the engine core does not overlap steps"


def test_overlapping_steps_do_not_change_answers(tight: Engine, overlapped: Engine) -> None:
    asks = [Ask(a.tokens, a.max_tokens, a.extra) for a in mixed_asks(seed=7)]
    alone = tight.ask_one_by_one(*asks)
    overlapped.reset()
    together = overlapped.ask(*asks)
    found = noise(asks, alone, together)
    print(found)
    assert found.first_max <= 0.4 and found.first_mean <= 0.05 and found.agreement >= 0.6, found
