"""The pool's books: laws under any sequence of operations, and the eviction order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hypic.connector.scheduler.directory import Lookup, Need, SegmentDirectory
from vllm_hypic.pool.plans import Space
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.store.eviction import PolicyName, make_policy

PAGES, SLOTS, PAGE_TOKENS, BLOCKS = 12, 5, 4, 10
NEEDS = {
    SegmentKey(name): Need(columns, transition_blocks)
    for name, columns, transition_blocks in zip(
        "abcdefgh", (1, 4, 5, 8, 12, 13, 20, 40), (3, 3, 0, 3, 3, 3, 3, 3), strict=True
    )
}
"""Every record that the machine asks for; a key always needs the same."""


def directory(
    pages: int = PAGES, slots: int = SLOTS, transition_blocks: int = 100, policy: PolicyName = "lru"
) -> SegmentDirectory:
    return SegmentDirectory(pages, slots, PAGE_TOKENS, transition_blocks, policy=make_policy(policy))


def wanted(*keys: str) -> dict[SegmentKey, Need]:
    return {SegmentKey(k): NEEDS[SegmentKey(k)] for k in keys}


def fill(books: SegmentDirectory, *keys: str) -> None:
    """Compute each record alone and let it go."""
    for key in keys:
        for entry in books.acquire(wanted(key)) or []:
            books.commit(entry.key)
        books.release(wanted(key))


class DirectoryMachine(RuleBasedStateMachine):
    """Requests acquire sets of records; segment requests commit or die; requests end at any time; records are
    kept, let go and discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[SegmentKey] = set()
        self.doomed: set[SegmentKey] = set()
        self.holders: list[dict[SegmentKey, Need]] = []
        self.computing: set[SegmentKey] = set()

    @initialize(policy=st.sampled_from(["lru", "flop-aware"]))
    def start(self, policy: PolicyName) -> None:
        self.books = directory(transition_blocks=BLOCKS, policy=policy)

    @rule(keys=st.sets(st.sampled_from(sorted(NEEDS)), min_size=1, max_size=4))
    def acquire(self, keys: set[SegmentKey]) -> None:
        asked = {k: NEEDS[k] for k in sorted(keys)}
        before = self.counts()
        missing = {k for k in asked if self.books.lookup(k) is Lookup.MISS}
        reserved = self.books.acquire(asked)
        if reserved is None:
            assert self.counts() == before, "a refused request changed the books"
            assert not self.fits_beside_held(asked)
            return
        assert {e.key for e in reserved} == missing
        for entry in reserved:
            assert Need(entry.columns, entry.transition_blocks) == NEEDS[entry.key] and not entry.resident
        self.holders.append(asked)
        self.computing |= missing

    def fits_beside_held(self, asked: dict[SegmentKey, Need]) -> bool:
        """Whether ``asked`` fits when everything that nobody uses, computes or keeps is evicted; kept records
        go too when nothing runs."""
        kept = {k for h in self.holders for k in h} | self.computing | set(asked)
        if self.holders or self.computing:
            kept |= {k for k in self.kept if self.books.lookup(k) is not Lookup.MISS}
        pages = sum(self.books.pages_for(NEEDS[k].columns) for k in kept)
        held = [k for k in kept if self.books.lookup(k) is not Lookup.MISS]
        transition_blocks = sum(self.books.get(k).transition_blocks for k in held) + sum(
            NEEDS[k].transition_blocks for k in kept - set(held)
        )
        return pages <= PAGES and len(kept) <= SLOTS and transition_blocks <= BLOCKS

    def counts(self) -> tuple[int, ...]:
        books = self.books
        return len(books), books.free_pages, books.free_slots, books.free_transition_blocks, books.evictions

    @rule(serial=st.integers(1, 30), transition_blocks=st.integers(0, 4))
    def shrink(self, serial: int, transition_blocks: int) -> None:
        """The worker's word on a record, or on one that is gone."""
        free = self.books.free_transition_blocks
        self.books.shrink(serial, transition_blocks)
        assert self.books.free_transition_blocks >= free

    @rule()
    def dropped_slots_are_free(self) -> None:
        dropped = self.books.take_dropped_slots()
        assert self.books.take_dropped_slots() == []
        assert set(dropped) <= set(range(SLOTS))

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.computing)))
        self.books.commit(key)
        self.computing.discard(key)
        gone = key in self.doomed and not any(key in h for h in self.holders)
        assert self.books.lookup(key) is (Lookup.MISS if gone else Lookup.HIT)
        self.doomed -= {key} if gone else set()

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.computing)))
        held = any(key in h for h in self.holders)
        assert self.books.abort(key) is held
        if held:
            assert self.books.lookup(key) is Lookup.PENDING
        else:
            assert self.books.lookup(key) is Lookup.MISS
            self.computing.discard(key)
            self.doomed.discard(key)

    @rule(key=st.sampled_from(sorted(NEEDS)))
    def keep(self, key: SegmentKey) -> None:
        self.books.keep(key, NEEDS[key])
        self.kept.add(key)

    @rule(key=st.sampled_from(sorted(NEEDS)))
    def unkeep(self, key: SegmentKey) -> None:
        self.books.unkeep(key)
        self.kept.discard(key)

    @rule(key=st.sampled_from(sorted(NEEDS)))
    def discard(self, key: SegmentKey) -> None:
        self.books.discard(key)
        if any(key in h for h in self.holders) or key in self.computing:
            assert self.books.lookup(key) is not Lookup.MISS
            self.doomed.add(key)
        else:
            assert self.books.lookup(key) is Lookup.MISS

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        released = self.holders.pop(index)
        self.books.release(released)
        held = {k for h in self.holders for k in h}
        for key in self.doomed & released.keys() - held - self.computing:
            assert self.books.lookup(key) is Lookup.MISS
            self.doomed.discard(key)

    @rule()
    def drop_unpinned(self) -> None:
        held = {k for h in self.holders for k in h}
        self.books.drop_unpinned()
        assert len(self.books) == len(held | self.computing)

    @invariant()
    def books_are_right(self) -> None:
        self.books.check_integrity()
        held = {k for h in self.holders for k in h}
        assert self.books.pinned == len(held)
        for key in held:
            assert self.books.get(key).pins == sum(key in h for h in self.holders)
        for key in self.computing:
            assert self.books.lookup(key) is Lookup.PENDING


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_least_recently_used_record_is_evicted_first() -> None:
    books = directory(slots=3)
    fill(books, "a", "b", "c")
    fill(books, "a")  # a hit makes it the youngest
    fill(books, "d")
    assert [books.lookup(SegmentKey(k)) for k in "abcd"] == [Lookup.HIT, Lookup.MISS, Lookup.HIT, Lookup.HIT]
    fill(books, "e")
    assert books.lookup(SegmentKey("c")) is Lookup.MISS
    assert books.evictions == 2


def test_pinned_and_pending_records_are_never_evicted() -> None:
    books = directory(slots=3)
    fill(books, "a")
    assert books.acquire(wanted("b")) is not None  # pending and held
    books.acquire(wanted("c"))
    books.commit(SegmentKey("c"))  # resident and held
    assert books.acquire(wanted("d", "a")) is None, "only a is free to go, and it is wanted itself"
    assert books.acquire(wanted("d")) is not None
    assert books.lookup(SegmentKey("a")) is Lookup.MISS


def test_kept_records_leave_last_and_only_when_nothing_runs() -> None:
    books = directory(slots=3)
    fill(books, "a", "b", "c")
    books.keep(SegmentKey("a"), NEEDS[SegmentKey("a")])
    fill(books, "d", "e")
    assert books.lookup(SegmentKey("a")) is Lookup.HIT
    assert books.kept_space() == Space(1, 1, 3)
    books.acquire(wanted("d"))
    assert books.acquire(wanted("f", "g")) is None, "d's request will end, and a may stay"
    books.release(wanted("d"))
    assert books.acquire(wanted("b", "f", "g")) is not None
    assert books.lookup(SegmentKey("a")) is Lookup.MISS
    assert books.kept_space() == Space(1, 1, 3), "when it comes back it needs its place"


def test_released_while_pending_keeps_its_place_until_commit() -> None:
    books = directory()
    books.acquire(wanted("a"))
    books.release(wanted("a"))
    assert books.drop_unpinned() == 0
    books.commit(SegmentKey("a"))
    assert books.drop_unpinned() == 1


def test_one_acquire_too_many_released_is_an_error() -> None:
    books = directory()
    fill(books, "a")
    with pytest.raises(RuntimeError, match="released more often than pinned"):
        books.release(wanted("a"))


def test_tiles_that_a_record_did_not_need_serve_others() -> None:
    books = directory(transition_blocks=5)
    fill(books, "a")
    assert books.acquire(wanted("a", "b")) is None, "each may need three"
    books.shrink(books.get(SegmentKey("a")).serial, 1)
    assert books.free_transition_blocks == 4
    assert books.acquire(wanted("a", "b")) is not None
    books.shrink(books.get(SegmentKey("a")).serial, 2)
    assert books.free_transition_blocks == 1, "a record never grows"


def test_a_late_word_on_another_record_changes_nothing() -> None:
    """The same segment, dropped and reserved anew in the same place, is another record."""
    books = directory(transition_blocks=5)
    fill(books, "a")
    old = books.get(SegmentKey("a")).serial
    books.drop_unpinned()
    books.acquire(wanted("a"))
    books.shrink(old, 0)
    assert books.free_transition_blocks == 2


def test_tiles_make_records_leave() -> None:
    books = directory(transition_blocks=6)
    fill(books, "a", "b")
    slot = books.get(SegmentKey("a")).slot
    fill(books, "d")
    assert books.lookup(SegmentKey("a")) is Lookup.MISS and books.take_dropped_slots() == [slot]


@pytest.mark.parametrize("damage", ["page twice", "slot lost", "transition block lost", "negative pins"])
def test_integrity_check_finds_planted_damage(damage: str) -> None:
    books = directory()
    fill(books, "a", "f")
    books.check_integrity()
    entry = books.get(SegmentKey("f"))
    if damage == "page twice":
        books._free_pages.append(entry.pages[0])
    elif damage == "slot lost":
        books._free_slots.pop()
    elif damage == "transition block lost":
        books.free_transition_blocks -= 1
    else:
        entry.pins = -1
    with pytest.raises(RuntimeError, match="public pool"):
        books.check_integrity()
