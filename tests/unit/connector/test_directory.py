"""The pool's books: laws under any sequence of operations, and the eviction order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hypic.connector.scheduler.directory import SegmentDirectory
from vllm_hypic.connector.scheduler.entries import Entry, Lookup, Need
from vllm_hypic.pool.plans import Space
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.store.eviction.policy import PolicyName, make_policy

PAGES, SLOTS, PAGE_TOKENS, BLOCKS = 12, 5, 4, 10
NEEDS = {
    SegmentKey(name): Need(columns, 0 if name == "c" else 3)
    for name, columns in zip("abcdefgh", (1, 4, 5, 8, 12, 13, 20, 40), strict=True)
}
"""Every record that the machine asks for; a key always needs the same."""


def directory(
    slots: int = SLOTS, transition_blocks: int = 100, policy: PolicyName = "lru", state_pages: int = 0
) -> SegmentDirectory:
    total = Space(PAGES, slots, transition_blocks)
    return SegmentDirectory(total, PAGE_TOKENS, policy=make_policy(policy), state_pages=state_pages)


def wanted(*keys: str) -> dict[SegmentKey, Need]:
    return {SegmentKey(k): NEEDS[SegmentKey(k)] for k in keys}


def fill(books: SegmentDirectory, *keys: str) -> None:
    """Compute each record alone and let it go."""
    for key in keys:
        for entry in books.acquire(wanted(key)) or []:
            books.commit(entry)
        release(books, key)


def release(books: SegmentDirectory, *keys: str) -> None:
    books.release([books.get(SegmentKey(k)) for k in keys])


class DirectoryMachine(RuleBasedStateMachine):
    """Requests acquire sets of records; segment requests commit or die; requests end at any time; records are
    kept, let go and discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[SegmentKey] = set()
        self.holders: list[list[Entry]] = []
        self.computing: list[Entry] = []

    @initialize(policy=st.sampled_from(["lru", "flop-aware"]), state_pages=st.sampled_from([0, 2]))
    def start(self, policy: PolicyName, state_pages: int) -> None:
        self.books = directory(transition_blocks=BLOCKS, policy=policy, state_pages=state_pages)

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
        self.holders.append([self.books.get(k) for k in asked])
        self.computing += reserved

    def in_use(self) -> set[Entry]:
        """Records that are held or made."""
        return {e for h in self.holders for e in h} | set(self.computing)

    def held(self, entry: Entry) -> bool:
        return any(entry in h for h in self.holders)

    def here(self, entry: Entry) -> bool:
        return self.books.of_serial(entry.serial) is entry

    def fits_beside_held(self, asked: dict[SegmentKey, Need]) -> bool:
        """Whether ``asked`` fits when everything that nobody uses, computes or keeps is evicted; kept records
        go too when nothing runs."""
        kept = self.kept if self.holders or self.computing else set()
        stay = self.in_use() | {self.books.get(k) for k in {*kept, *asked} if self.is_found(k)}
        room = sum((e.space for e in stay), Space())
        room += sum((self.books.space_for(n) for k, n in asked.items() if not self.is_found(k)), Space())
        return Space(PAGES, SLOTS, BLOCKS).covers(room)

    def is_found(self, key: SegmentKey) -> bool:
        return self.books.lookup(key) is not Lookup.MISS

    def counts(self) -> tuple[int, ...]:
        books = self.books
        return len(books), books.free, books.evictions

    @rule(place=st.integers(0, 10), transition_blocks=st.integers(0, 4))
    def shrink(self, place: int, transition_blocks: int) -> None:
        """The worker's word on a record, or on one that is gone."""
        here = [e.serial for e in self.all()]
        gone = [n for n in range(max(here, default=0) + 2) if n not in here]
        serial = [*here, *gone][place % len([*here, *gone])]
        free, entry = self.books.free_transition_blocks, self.books.of_serial(serial)
        spare = 0 if entry is None else max(0, entry.transition_blocks - transition_blocks)
        self.books.shrink(serial, transition_blocks)
        assert self.books.free_transition_blocks == free + spare, "no record grows"

    @rule()
    def news_of_slots_are_told_once(self) -> None:
        dropped, taken = self.books.slots.take_news()
        assert self.books.slots.take_news() == ([], {})
        assert set(dropped) <= set(range(SLOTS)) and taken.keys() <= {e.slot for e in self.all()}
        assert {len(pages) for pages in taken.values()} <= {self.books.slots.space.pages}

    def all(self) -> list[Entry]:
        """All records, those that are forgotten among them."""
        return list(self.books._by_serial.values())

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        entry = self.computing.pop(data.draw(st.integers(0, len(self.computing) - 1)))
        self.books.commit(entry)
        assert self.here(entry) is (self.held(entry) or not entry.forgotten)
        assert entry.forgotten or self.books.lookup(entry.key) is Lookup.HIT

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.computing))
        held = self.held(entry)
        assert self.books.abort(entry) is held is self.here(entry)
        if not held:
            self.computing.remove(entry)

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
        used = [e for e in self.in_use() if e.key == key and not e.forgotten]
        stays = self.books.discard(key)
        assert self.books.lookup(key) is Lookup.MISS, "who asks from now on gets another"
        assert [stays] == (used or [None]) and (stays is None or self.here(stays))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        released = self.holders.pop(index)
        self.books.release(released)
        in_use = self.in_use()
        for entry in released:
            assert self.here(entry) is (entry in in_use or not entry.forgotten)

    @rule()
    def drop_unpinned(self) -> None:
        self.books.drop_unpinned()
        assert len(self.books) == len(self.in_use())

    @invariant()
    def books_are_right(self) -> None:
        self.books.check_integrity()
        held = {e for h in self.holders for e in h}
        assert self.books.pinned == len(held)
        for entry in held:
            assert entry.pins == sum(entry in h for h in self.holders)
        for entry in self.computing:
            assert self.here(entry) and not entry.resident
            assert entry.forgotten or self.books.lookup(entry.key) is Lookup.PENDING


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


def test_kept_records_leave_last_and_only_when_nothing_runs() -> None:
    books = directory(slots=3)
    fill(books, "a", "b", "c")
    books.keep(SegmentKey("a"), NEEDS[SegmentKey("a")])
    fill(books, "d", "e")
    assert books.lookup(SegmentKey("a")) is Lookup.HIT
    assert books.kept_space() == Space(1, 1, 3)
    books.acquire(wanted("d"))
    assert books.acquire(wanted("f", "g")) is None, "d's request will end, and a may stay"
    release(books, "d")
    assert books.acquire(wanted("b", "f", "g")) is not None
    assert books.lookup(SegmentKey("a")) is Lookup.MISS
    assert books.kept_space() == Space(1, 1, 3), "when it comes back it needs its place"


def test_one_acquire_too_many_released_is_an_error() -> None:
    books = directory()
    fill(books, "a")
    with pytest.raises(RuntimeError, match="released more often than pinned"):
        release(books, "a")


def test_a_forgotten_record_stays_for_its_users_only() -> None:
    """However many ask for the same segment meanwhile: they get a record of their own."""
    books = directory(slots=2)
    fill(books, "a")
    books.acquire(wanted("a"))
    old = books.get(SegmentKey("a"))
    assert books.discard(old.key) is old and books.discard(old.key) is None
    [new] = books.acquire(wanted("a")) or []
    assert new is not old and (new.slot, len(books)) == (1 - old.slot, 2)
    books.check_integrity()
    books.release([old])
    assert books.of_serial(old.serial) is None and books.lookup(old.key) is Lookup.PENDING
    books.commit(new)
    books.release([new])
    books.check_integrity()
    assert books.lookup(old.key) is Lookup.HIT and books.pinned == 0


def test_tiles_make_records_leave() -> None:
    books = directory(transition_blocks=6)
    fill(books, "a", "b")
    slot = books.get(SegmentKey("a")).slot
    fill(books, "d")
    assert books.lookup(SegmentKey("a")) is Lookup.MISS and books.slots.take_news()[0] == [slot]
