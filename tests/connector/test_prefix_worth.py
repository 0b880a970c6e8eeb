"""What states of prefixes are worth to eviction, and who leaves by that."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_hypic.connector.scheduler.entries import Entry
from vllm_hypic.store.cache_value import CacheValue

from .simulated_worker import PAGE
from .test_answers import ANSWER, Side


def flops(tokens: int) -> float:
    return 1e6 * tokens + 1e3 * tokens**2


def text(number: int, pages: int) -> tuple[int, ...]:
    return tuple(range(10_000 * number, 10_000 * number + pages * PAGE))


def entry(side: Side, tokens: Sequence[int]) -> Entry:
    """The record of these whole pages."""
    return side.side.directory.get(side.plan((*tokens, 1)).segments[0].key)


def behind(side: Side, first: int, stop: int) -> CacheValue:
    """A state at page ``stop`` whose next one before it is at page ``first``."""
    geometry, tokens = side.side.geometry, (stop - first) * PAGE
    saved = flops(stop * PAGE) - flops(first * PAGE)
    return CacheValue(tokens, saved, geometry.slot_bytes + (stop - first) * geometry.page_bytes)


def test_a_state_is_worth_what_it_has_beyond_the_one_before() -> None:
    side = Side(flops=flops)
    common, whole = text(1, 3), (*text(1, 3), *text(2, 3))
    side.ask("first", (*whole, 1), ())
    assert entry(side, whole).worth == behind(side, 0, 6)
    forks = [(*common, *text(n, 2)) for n in (3, 4)]
    side.ask("parts", (*forks[0], 1), ())
    assert entry(side, common).worth == behind(side, 0, 3), "kept on the way"
    assert entry(side, forks[0]).worth == behind(side, 3, 5)
    assert entry(side, forks[0]).value == behind(side, 0, 5), "what a hit saves"
    assert side.ask("goes on", (*forks[1], 1), ANSWER) == 2 * PAGE + 1
    assert entry(side, forks[1]).worth == behind(side, 3, 5)
    assert entry(side, (*forks[1], 1, *ANSWER)[: 9 * PAGE]).worth == behind(side, 5, 9)


def test_who_saves_most_for_its_bytes_stays_longer() -> None:
    """The older prompt is the longer one, so a byte of it is worth more."""
    side = Side(slots=3, flops=lambda tokens: float(tokens**3))
    side.side.answers._on = False
    long, short, other = text(1, 20), text(2, 2), text(3, 4)
    for name, prompt in (("long", long), ("short", short), ("other", other), ("next", text(4, 4))):
        side.ask(name, (*prompt, 1), ())
    assert side.has(long) and not side.has(short)
