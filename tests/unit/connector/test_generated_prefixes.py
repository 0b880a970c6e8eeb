"""Records of answers and prefixes in the scheduler: names, places, values, which record gives way."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.scheduler import placement, reuse_estimator
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Entry, Lookup, Need
from vllm_hypic.connector.scheduler.growing import GrowingDirectory
from vllm_hypic.connector.scheduler.placement import APART_TOKENS, LEAST_OVERLAPS, PrefixPlacement
from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.connector.scheduler.reuse_estimator import LEAST_ENDS, REMEMBERED, ReuseEstimator
from vllm_hypic.pool.plans import CapturePlan, Space
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.primitives.plan import CachedSegment, PoolLimits, PromptPlan
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.prefix import build_prefix_plan
from vllm_hypic.primitives.tokens import PrimitiveIds
from vllm_hypic.store.protocol import CacheValue

from .simulated_worker import PAGE
from .vocabulary import geometry

SLOTS = 8
PROMPT = tuple(range(1000, 1000 + 3 * PAGE + 3))
ANSWER = tuple(range(2000, 2000 + 4 * PAGE))


class Side:
    """An engine's scheduler side, without the engine.  Requests have ordinary prompts and run alone."""

    def __init__(
        self, pages: int = 64, slots: int = SLOTS, flops: Callable[[int], float] = float, **more: Any
    ) -> None:
        options = {"prefix": "sparse", "page_tokens": PAGE, "min_segment_tokens": PAGE} | more
        ids = PrimitiveIds(sep=1, pdep=2, pad=3)
        self.side = SchedulerConnector(
            HypicConfig.from_mapping(options | {"context": "none", "islands": "none"}),
            geometry(pages, slots),
            Namespace.from_config({}),
            1_000_000,
            lambda: ids,
            flops,
            keeps_answers=True,
        )

    def plan(self, tokens: Sequence[int]) -> PromptPlan:
        spec = self.side.spec({}, len(tokens))
        plan = self.side.planner.plan_prefix(PlanRequest(list(tokens), spec, None, None))
        assert plan is not None
        return plan

    def begin(self, name: str, tokens: Sequence[int], tenant: str = "") -> int:
        """Prefill the prompt; how many of its tokens are computed."""
        self.side.admit(name, self.plan(tokens), tenant=tenant)
        self.side.begin_pass()
        assert self.side.ready(name)
        return self.prefill(name)

    def prefill(self, name: str) -> int:
        computed = len(self.side.admission.requests[name].running.stream)
        self.passes = {name: self.run(name, 0, computed)}
        self.side.prefixes.passed(name, computed)
        return computed

    def run(self, name: str, begin: int, end: int) -> tuple[CapturePlan, ...] | None:
        return self.side.generated.scheduled([(name, begin, end)]).get(name)

    def decode(self, name: str, computed: int, count: int) -> list[CapturePlan]:
        """So many tokens, one by one; what they capture."""
        plans: list[CapturePlan] = []
        for at in range(computed, computed + count):
            plans += self.run(name, at, at + 1) or ()
        return plans

    def ask(self, name: str, tokens: Sequence[int], answer: Sequence[int], *, late: bool = False) -> int:
        """A whole request; how many tokens of its prompt are computed.  ``late``: the step behind the last
        token was scheduled before it was known to be that."""
        computed = self.begin(name, tokens)
        self.decode(name, computed, len(answer) - 1 + late)
        self.end(name, (*tokens[len(tokens) - computed :], *answer))
        return computed

    def end(self, name: str, tokens: Sequence[int]) -> None:
        self.side.finished(name, completed=True, tokens=tokens)
        self.side.directory.check_integrity()

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the record of these whole pages is found."""
        segment = self.plan((*tokens, 1)).segments[0]
        assert segment.stop == len(tokens)
        return self.side.directory.lookup(segment.key) is Lookup.HIT


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", range(1, 2 * PAGE + 2))
def test_a_record_ends_at_the_last_whole_page_that_was_computed(side: Side, length: int, late: bool) -> None:
    whole = (*PROMPT, *ANSWER[:length])
    side.ask("first", PROMPT, ANSWER[:length], late=late)
    end = (len(whole) - 1 + late) // PAGE * PAGE
    assert side.has(whole[:end])
    later = (*whole, *range(5000, 5004))
    assert side.begin("second", later) == len(later) - end


def test_pages_follow_each_other_and_states_stay_in_one_place(side: Side) -> None:
    computed = side.begin("a", PROMPT)
    first, *more = [*(side.passes["a"] or ()), *side.decode("a", computed, 2 * PAGE)]
    assert (first.lo, first.hi) == (3 * PAGE, 4 * PAGE)
    assert [plan.lo for plan in more] == [4 * PAGE, 5 * PAGE]
    assert len({plan.slot for plan in (first, *more)}) == 1
    assert len({int(plan.slot_mapping[0]) for plan in (first, *more)}) == 3
    assert list(first.local_positions(first.lo, first.hi)) == list(range(3 * PAGE, 4 * PAGE))


def test_a_prompt_that_waits_is_given_the_room() -> None:
    small = Side(pages=7)
    computed = small.begin("a", PROMPT)
    small.decode("a", computed, 2 * PAGE)
    assert small.side.directory.free.pages == 1
    small.side.admit("b", small.plan(range(4000, 4000 + 4 * PAGE + 1)))
    small.side.begin_pass()
    small.side.begin_pass()
    assert small.side.ready("b")
    assert small.run("a", computed + 2 * PAGE, computed + 2 * PAGE + 1) == (), "the worker is told"
    small.end("a", (*PROMPT, *ANSWER[: 2 * PAGE]))
    assert not small.has((*PROMPT, *ANSWER)[: 4 * PAGE])


def test_who_finds_no_page_keeps_what_it_has() -> None:
    small = Side(pages=5)
    small.ask("a", PROMPT, ANSWER)
    assert small.has((*PROMPT, *ANSWER)[: 5 * PAGE])


def test_who_generates_too_little_takes_no_room(side: Side) -> None:
    for most, taken in ((PAGE - 3, 1), (PAGE - 2, 2)):
        side.side.generated.expect(f"{most}", most)
        side.begin(f"{most}", PROMPT)
        assert side.side.directory.used.slots == taken
        side.end(f"{most}", ())


def test_nothing_is_left_of_deleted_records_and_former_weights(side: Side) -> None:
    """Nor of a request that begins anew, nor under the name of tokens that are not known."""
    computed = side.begin("anew", PROMPT)
    side.decode("anew", computed, 2 * PAGE)
    assert side.run("anew", 0, computed + 2 * PAGE) == ()
    side.end("anew", (*PROMPT, *ANSWER[: 2 * PAGE + 1]))
    side.decode("unknown", side.begin("unknown", PROMPT), PAGE - 3)
    side.end("unknown", (*PROMPT, *ANSWER[: PAGE - 4]))
    assert not side.has((*PROMPT, *ANSWER)[: 4 * PAGE])
    side.decode("a", side.begin("a", PROMPT), 2 * PAGE)
    side.side.directory.discard(side.plan(PROMPT).segments[0].key)
    side.end("a", (*PROMPT, *ANSWER))
    assert not side.has((*PROMPT, *ANSWER)[: 5 * PAGE])
    side.decode("b", side.begin("b", PROMPT), 2 * PAGE)
    side.side.reset("other")
    side.end("b", (*PROMPT, *ANSWER))
    assert len(side.side.directory) == 0


def test_a_prompts_end_leaves_first_unless_it_is_asked_again() -> None:
    for again in (False, True):
        side = Side(slots=4)
        side.ask("a", PROMPT, ANSWER)
        if again:
            side.ask("again", PROMPT, ANSWER[:2])
        side.ask("b", range(4000, 4000 + 2 * PAGE), ())
        side.ask("c", range(6000, 6000 + 2 * PAGE), ())
        assert side.has(PROMPT[: 3 * PAGE]) is again


def test_answers_that_nobody_goes_on_from_are_not_kept(side: Side) -> None:
    """And are again, once somebody would have."""
    for i in range(LEAST_ENDS + SLOTS):
        assert side.side.generated._estimator.worth_keeping or i > LEAST_ENDS
        side.ask(f"{i}", (i, *PROMPT), ANSWER)
    assert not side.side.generated._estimator.worth_keeping, "no prompt continued these answers"
    side.ask("once", (99, *PROMPT), ANSWER)
    assert not side.has((99, *PROMPT, *ANSWER)[: 6 * PAGE])
    for i in range(LEAST_ENDS):
        side.ask(f"more {i}", (i, *PROMPT, *ANSWER, *PROMPT), ANSWER)
    side.ask("twice", (98, *PROMPT), ANSWER)
    assert side.has((98, *PROMPT, *ANSWER)[: 7 * PAGE])


def test_answers_are_kept_while_their_like_are_in_the_pool() -> None:
    """Nobody has come back from what was asked lately: that says nothing yet."""
    count = 2 * LEAST_ENDS
    side = Side(pages=8 * count, slots=2 * count)
    for i in range(count):
        side.ask(f"{i}", (i, *PROMPT), ANSWER)
    assert side.has((count - 1, *PROMPT, *ANSWER)[: 7 * PAGE])


def test_an_end_counts_once_it_would_have_left_the_tiers_too() -> None:
    """Of those whose size is known the largest: every tier has what is written."""
    size = geometry(64, SLOTS).nbytes
    tiers = [{"type": "memory", "bytes": size}, {"type": "disk", "path": "/nowhere", "bytes": 2 * size}]
    tiers.append({"type": "redis", "url": "redis://nowhere"})
    for given, times in (([], 1), (tiers, 3), (tiers[2:], 1)):
        config = HypicConfig.from_mapping({"store": {"tiers": given}})
        directory = GrowingDirectory.of(config, geometry(64, SLOTS))
        entries = directory.acquire({SegmentKey("a"): Need(PAGE), SegmentKey("b"): Need(PAGE)})
        assert entries is not None and directory.leaves_at() == 2 * times


def test_what_grows_counts_to_its_tenants_share() -> None:
    """Its own pages, and a state; what it began with is the prompt's."""
    side = Side(max_tenant_fraction=0.5)
    side.decode("a", side.begin("a", PROMPT, "tenant"), 2 * PAGE)
    assert side.side.directory.held_by("tenant") == Space(3 + 3, 2)
    side.side.directory.check_integrity()
    side.end("a", (*PROMPT, *ANSWER[: 2 * PAGE + 1]))
    assert side.side.directory.held_by("tenant") == Space()


def test_nothing_grows_beyond_its_tenants_share() -> None:
    for fraction, pages in ((0.5, 6), (0.25, 3), (1.0, 7)):
        side = Side(pages=12, max_tenant_fraction=fraction)
        side.ask("a", PROMPT, ANSWER)
        assert max(entry.columns for entry in side.side.directory.resident()) == pages * PAGE


def test_who_waits_in_its_share_is_given_what_grows_of_it_alone() -> None:
    side = Side(max_tenant_fraction=0.25)
    computed = [side.begin(tenant, (ord(tenant), *PROMPT), tenant) for tenant in "ab"]
    side.side.admit("later", side.plan(range(7000, 7000 + 4 * PAGE)), tenant="a")
    for _ in range(2):
        assert not side.side.ready("later"), "its tenant has two states, and may have no more"
        side.side.begin_pass()
    assert side.side.ready("later")
    answers = {name: side.side.generated._answers[name] for name in "ab"}
    assert answers["a"] is None and answers["b"] is not None
    assert len(side.decode("b", computed[1], 2 * PAGE)) == 2


def test_many_at_once_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for, all of which leave checkpoints, and grow until somebody waits."""
    monkeypatch.setattr(placement, "APART_TOKENS", 2 * PAGE)
    monkeypatch.setattr(reuse_estimator, "LEAST_ENDS", 1000)
    for options, tenants in (({}, ("",)), ({"max_tenant_fraction": 0.5}, ("a", "b"))):
        side = Side(pages=40, slots=10, **options)
        prompts = {f"{i}": tuple(range(1000 * i, 1000 * i + 8 * PAGE + 3)) for i in range(10, 50)}
        waiting = list(prompts)
        for i, (name, tokens) in enumerate(prompts.items()):
            side.side.admit(name, side.plan(tokens), tenant=tenants[i % len(tenants)])
        running: dict[str, int] = {}
        given_up, steps = 0, 0
        while waiting or running:
            side.side.begin_pass()
            for name in [name for name in waiting if side.side.ready(name)]:
                waiting.remove(name)
                running[name] = side.prefill(name)
            captured = side.side.generated.scheduled([(name, at, at + 1) for name, at in running.items()])
            given_up += sum(plans == () for plans in captured.values())
            for name in list(running):
                running[name] += 1
                if running[name] == len(prompts[name]) + 2 * PAGE:
                    del running[name]
                    side.end(name, (*prompts[name], *ANSWER[: 2 * PAGE + 1]))
            steps += 1
            assert steps < len(prompts) * 3 * PAGE, f"{waiting} wait, {list(running)} run"
        assert given_up and side.side.directory.pinned == 0
        side.ask("alone", PROMPT, ANSWER)
        assert side.has((*PROMPT, *ANSWER)[: 7 * PAGE])


@pytest.mark.parametrize("grow", [False, True])
def test_ends_that_nobody_goes_on_from_leave_before_checkpoints(grow: bool) -> None:
    """Forks of one prompt leave its beginning to others that come later; turns leave their ends."""
    side = Side(slots=6)
    side.side.generated._on = False
    prompt = PROMPT[: 3 * PAGE]
    for i in range(LEAST_ENDS + SLOTS):
        tail = range(5000 + 100 * i, 5000 + 100 * i + PAGE)
        side.ask(f"{i}", (*prompt, *tail, 1), ())
        prompt = (*prompt, *tail) if grow else prompt
    assert side.has(prompt)
    for i in range(10):
        side.ask(f"other {i}", range(9000 + 100 * i, 9000 + 100 * i + 2 * PAGE), ())
    assert side.has(prompt) is not grow


@pytest.mark.parametrize("full", [False, True])
def test_few_are_remembered(side: Side, full: bool) -> None:
    """Of those that still may be gone on from, and of the others."""
    side.ask("a", PROMPT, ANSWER)
    directory = side.side.directory
    counted, held = ReuseEstimator(directory), len(directory)
    until = LEAST_ENDS + (held if full else REMEMBERED)
    for i in range(25_000):
        directory.evictions += full
        counted.add_end(SegmentKey(f"{i}"))
        assert counted.worth_keeping is (i + 1 < until)
    assert len(counted._open) <= REMEMBERED and len(counted._unused) <= REMEMBERED
    assert len(counted._open) + len(counted._unused) >= REMEMBERED


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
    assert entry(side, whole).eviction_value == behind(side, 0, 6)
    forks = [(*common, *text(n, 2)) for n in (3, 4)]
    side.ask("parts", (*forks[0], 1), ())
    assert entry(side, common).eviction_value == behind(side, 0, 3), "kept on the way"
    assert entry(side, forks[0]).eviction_value == behind(side, 3, 5)
    assert entry(side, forks[0]).hit_value == behind(side, 0, 5), "what a hit saves"
    assert side.ask("goes on", (*forks[1], 1), ANSWER) == 2 * PAGE + 1
    assert entry(side, forks[1]).eviction_value == behind(side, 3, 5)
    assert entry(side, (*forks[1], 1, *ANSWER)[: 9 * PAGE]).eviction_value == behind(side, 5, 9)


def test_who_saves_most_for_its_bytes_stays_longer() -> None:
    """The older prompt is the longer one, so a byte of it is worth more."""
    side = Side(slots=3, flops=lambda tokens: float(tokens**3))
    side.side.generated._on = False
    long, short, other = text(1, 20), text(2, 2), text(3, 4)
    for name, prompt in (("long", long), ("short", short), ("other", other), ("next", text(4, 4))):
        side.ask(name, (*prompt, 1), ())
    assert side.has(long) and not side.has(short)


ROOM = PoolLimits(10_000, 100, PAGE, 100_000)
APART = APART_TOKENS // PAGE


@pytest.fixture
def places() -> PrefixPlacement:
    config = HypicConfig.from_mapping({"prefix": "sparse", "page_tokens": PAGE})
    return PrefixPlacement(config, geometry(64, 8), float)


def prefix(*tokens: int) -> CachedSegment:
    """Of a prompt of these tokens and one more."""
    link = parse_link("hypic", 0, "none", "none")
    plan = build_prefix_plan((*tokens, -1), link, Namespace.from_config({}), ROOM, least_tokens=1)
    assert plan is not None
    return plan.segments[0]


def test_checkpoints_stand_apart_until_something_is_known(places: PrefixPlacement) -> None:
    """Of a long prompt no more than of a segment."""
    assert places.kept(prefix(*text(0, 3 * APART))) == {APART_TOKENS, 2 * APART_TOKENS}
    kept = places.kept(prefix(*text(1, 60 * APART)))
    assert 4 < len(kept) <= 8 and max(kept) == 59 * APART_TOKENS


def test_one_stands_where_a_prompt_parts_from_an_earlier_one(places: PrefixPlacement) -> None:
    places.kept(prefix(*text(0, 20)))
    assert places.kept(prefix(*text(0, 7), *text(1, 5))) == {7 * PAGE}


def test_none_stand_inside_where_prompts_only_grow(places: PrefixPlacement) -> None:
    """All that is shared is whole records: each is resumed from its end."""
    for talk in range(LEAST_OVERLAPS):
        for turn in range(1, 5):
            kept = places.kept(prefix(*text(talk, 10 * turn)))
    assert kept == {30 * PAGE}, "where the turn before ended"
    assert places.kept(prefix(*text(999, 3 * APART))) == set()
    assert places.kept(prefix(*text(777, 3)), prompts_grow=True) == set()
    assert places.kept(prefix(*text(777, 9)), prompts_grow=True) == set(), "nobody else parts there"
    assert places.kept(prefix(*text(777, 5), *text(778, 1)), prompts_grow=True) == {5 * PAGE}


def test_one_stands_where_prompts_have_parted(places: PrefixPlacement) -> None:
    """All have a tail of five pages for themselves."""
    for other in range(1, LEAST_OVERLAPS + 20):
        places.kept(prefix(*text(0, 40), *text(other, 5)))
    assert 40 * PAGE in places.kept(prefix(*text(1000, 45)))


def test_answers_do_not_move_where_prompts_part(places: PrefixPlacement) -> None:
    """Prompts part five pages before their ends, wherever that is; each has an answer behind it."""
    for other in range(2 * LEAST_OVERLAPS):
        for asked in (1, 2):
            tokens = (*text(other, (20 + other)), *text(1000 * asked + other, 5))
            places.kept(prefix(*tokens))
            places.grown(prefix(*tokens, *text(3000 + other, (10 + other % 7))))
    assert places.kept(prefix(*text(999, 90))) == {85 * PAGE}
