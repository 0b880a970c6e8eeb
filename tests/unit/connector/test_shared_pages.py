"""Pages that several records have: checkpoints, what is resumed from them, and what becomes free."""

from collections.abc import Callable

import pytest

from vllm_hypic.connector.scheduler.directory import SegmentDirectory
from vllm_hypic.connector.scheduler.entries import Entry, Lookup, Need
from vllm_hypic.pool.plans import Space
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.store.eviction.policy import make_policy

from .simulation import Clock, Engine, Prompt
from .vocabulary import FORKS, HEADS, Vocabulary, geometry

PAGES, SLOTS, PAGE_TOKENS, BLOCKS = 12, 6, 4, 3
LONG = Need(16, BLOCKS, has_scratch_slot=True)
"""Of a record of four pages, made in stretches."""
FIRST, HALF = Need(4, BLOCKS), Need(8, BLOCKS)
"""Of its checkpoints behind one page, and two."""


key = SegmentKey


@pytest.fixture
def books() -> SegmentDirectory:
    return SegmentDirectory(Space(PAGES, SLOTS, 6 * BLOCKS), PAGE_TOKENS, policy=make_policy("lru"))


def reserve(books: SegmentDirectory, name: str, need: Need = LONG) -> Entry:
    (entry,) = books.acquire({key(name): need}) or []
    return entry


def checkpoint(books: SegmentDirectory, name: str, record: Entry, need: Need = HALF) -> Entry:
    """A complete one that nobody uses."""
    made = books.checkpoint(key(name), record, need)
    assert made is not None and made.pins == 1
    books.commit(made)
    books.release([made])
    return made


def end(books: SegmentDirectory, *entries: Entry) -> None:
    for entry in entries:
        books.commit(entry)
        books.release([entry])
    books.check_integrity()


def made_with_checkpoint(books: SegmentDirectory) -> tuple[Entry, Entry]:
    record = reserve(books, "a")
    half = checkpoint(books, "a/8", record)
    end(books, record)
    return record, half


def test_a_spare_slot_goes_when_the_record_is_complete(books: SegmentDirectory) -> None:
    record = reserve(books, "a")
    assert record.scratch_slot is not None
    spare = record.scratch_slot.slot
    assert books.used == Space(4, 2, 2 * BLOCKS) == books.held_by("")
    books.shrink(record.serial, 1)
    assert books.used == Space(4, 2, BLOCKS + 1) == books.held_by("")
    books.commit(record)
    assert books.used == Space(4, 1, 1) == books.held_by("")
    assert books.slots.take_news()[0] == [spare]
    books.check_integrity()


def test_a_spare_slot_goes_with_a_record_that_is_given_up(books: SegmentDirectory) -> None:
    record = reserve(books, "a")
    books.release([record])
    assert not books.abort(record) and books.used == Space() == books.held_by("")
    assert sorted(books.slots.take_news()[0]) == [0, 1]


def test_a_checkpoint_takes_a_slot_and_no_page_and_is_resumed_once_complete(books: SegmentDirectory) -> None:
    """Of a deleted record none is made."""
    record = reserve(books, "a")
    made = books.checkpoint(key("a/8"), record, HALF)
    assert made is not None and books.checkpoint_at(made.key) is None
    assert books.held_by("") == Space(4, 2, 2 * BLOCKS), "a tenant holds no checkpoints: pages are a record's"
    books.check_integrity()
    books.commit(made)
    assert books.checkpoint_at(made.key) is made
    assert made.pages == record.pages[:2] and books.used == Space(4, 3, 3 * BLOCKS), "beside the spare"
    assert books.checkpoint(made.key, record, HALF) is None, "there is one"
    books.discard(record.key)
    assert books.checkpoint(key("a/4"), record, FIRST) is None


def test_a_resumed_record_gives_its_own_pages_back(books: SegmentDirectory) -> None:
    record, half = made_with_checkpoint(books)
    other = reserve(books, "b")
    assert books.used.pages == 8
    books.resume(other, half)
    assert other.pages[:2] == record.pages[:2] and not set(other.pages[2:]) & set(record.pages)
    assert books.used.pages == 6 and half.pins == 1
    books.release([half])
    end(books, other)


def test_a_record_that_will_be_resumed_needs_its_own_pages_alone(books: SegmentDirectory) -> None:
    """And what it is resumed from stays, the oldest though it is."""
    record, half = made_with_checkpoint(books)
    books.discard(record.key)
    (other,) = books.acquire({key("b"): Need(PAGES * PAGE_TOKENS)}, "", {key("b"): half}) or []
    assert other.pages[:2] == half.pages and len(other.pages) == PAGES and half.pins == 1
    books.resume(other, half)
    assert other.pages[:2] == half.pages and half.pins == 1 and books.evictions == 0
    books.release([half])
    end(books, other)


def test_a_record_to_resume_that_is_in_the_way_leaves(books: SegmentDirectory) -> None:
    """A request that the empty pool would hold must run some day."""
    books = SegmentDirectory(Space(4, 2, 2 * BLOCKS), PAGE_TOKENS, policy=make_policy("lru"))
    record = reserve(books, "a", Need(8, BLOCKS))
    end(books, record)
    (other,) = books.acquire({key("b"): LONG}, "", {key("b"): record}) or []
    assert books.lookup(record.key) is Lookup.MISS and other.resume_from is None
    end(books, other)


def test_who_gives_nothing_that_is_short_stays(books: SegmentDirectory) -> None:
    """Pages are short: a checkpoint has none of its own, however old it is, until its record has gone."""
    record, half = made_with_checkpoint(books)
    books.policy.hit(record.key)
    assert [e.key for e in books.resident()] == [half.key, record.key]
    assert books._victims(Space(pages=PAGES - 3), ()) == [record]
    assert books._victims(Space(pages=PAGES), ()) == [record, half]
    assert books._victims(Space(slots=SLOTS - 1), ()) == [half]
    assert books.acquire({key("b"): Need(PAGES * PAGE_TOKENS)}) is not None
    assert books.lookup(record.key) is books.lookup(half.key) is Lookup.MISS and books.evictions == 2
    books.check_integrity()


@pytest.mark.parametrize("first", [0, 1])
def test_pages_are_free_when_the_last_leaves(books: SegmentDirectory, first: int) -> None:
    both = made_with_checkpoint(books)
    books.discard(both[first].key)
    assert books.used.pages == len(both[1 - first].pages)
    books.check_integrity()
    books.discard(both[1 - first].key)
    assert books.used == Space()
    books.check_integrity()


def test_eviction_takes_what_becomes_free_and_no_more(books: SegmentDirectory) -> None:
    """The record's first two pages stay with its checkpoint, and go with both."""
    record, half = made_with_checkpoint(books)
    books.pin(half)
    assert reserve(books, "b", Need(32)) is not None, "beside the four"
    assert books.free.pages == 0
    assert books.acquire({key("c"): Need(12)}) is None, "two pages of the record's are the checkpoint's"
    assert books.lookup(record.key) is Lookup.HIT, "nothing has changed"
    assert books.acquire({key("c"): Need(8)}) is not None
    assert books.lookup(record.key) is Lookup.MISS and books.checkpoint_at(half.key) is half
    books.check_integrity()


def test_no_more_leave_than_must(books: SegmentDirectory) -> None:
    """Of three that share pages the third may stay where two make enough room."""
    record = reserve(books, "a")
    first, half = checkpoint(books, "a/4", record, FIRST), checkpoint(books, "a/8", record)
    end(books, record)
    order = [e for e in books.resident() if e in (record, first, half)]
    assert books._victims(Space(pages=PAGES - 2), ()) == order[: order.index(record) + 1]


def test_deleting_a_record_deletes_its_checkpoints(books: SegmentDirectory) -> None:
    record, half = made_with_checkpoint(books)
    other = reserve(books, "b")
    books.resume(other, half)
    books.release([half])
    end(books, other)
    books.discard_parts(other.key)
    assert books.lookup(half.key) is Lookup.MISS and books.lookup(record.key) is Lookup.HIT
    books.check_integrity()
    # Of a record that was evicted, too.
    books.discard(record.key)
    record, half = made_with_checkpoint(books)
    books.discard(record.key)
    assert books.checkpoint_at(half.key) is half
    books.discard_parts(record.key)
    assert books.used == other.space


def test_a_deleted_checkpoint_stays_for_who_reads_it(books: SegmentDirectory) -> None:
    record, half = made_with_checkpoint(books)
    other = reserve(books, "b")
    books.resume(other, half)
    books.discard_parts(record.key)
    assert books.checkpoint_at(half.key) is None and books.of_serial(half.serial) is half
    books.check_integrity()
    books.release([half])
    assert books.of_serial(half.serial) is None
    end(books, other)


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_what_begins_like_another_takes_no_room_while_tiers_are_asked(stored: bool, deleted: bool) -> None:
    """Nobody is evicted, whether a tier has it or it is resumed; also from what was deleted meanwhile."""
    words = Vocabulary((tuple(range(8)),), FORKS.documents[:2], geometry(8, 12), FORKS.checkpoint_tokens)
    engine = Engine(Clock("time"), words=words)
    engine.admit(Prompt(0, (0,)))
    while engine.waiting or engine.running:
        engine.work(found=True)
    directory = engine.side.directory
    assert directory.used.pages == 1 + 5
    engine.admit(Prompt(0, (1,)))
    wanted = engine.waiting["r2"].plan.records[1]
    engine.tiers.discard(wanted.key)
    engine.tiers.update([wanted.key] if stored else [])
    engine.step()
    assert directory.used.pages == 8, "of five pages three are another's"
    (place,) = engine.worker.moving.values()
    assert len(place.stored_slots) == 16 and directory.pinned == 3
    if deleted:
        engine.delete(next(key for key, s in engine.known.items() if len(s.tokens) == 40))
    before = engine.side.counters.tokens_resumed
    while engine.waiting or engine.running:
        engine.work(found=True)
    assert engine.side.counters.tokens_resumed - before == (0 if stored else 24)
    assert directory.evictions == 0 and directory.pinned == 0
    assert directory.used.pages == (6 if deleted else 8)


def test_a_pinned_record_has_room_to_be_made_in() -> None:
    """Or a request that wants it, and all the rest of the pool, would wait for ever."""
    engine = Engine(Clock("time"), words=FORKS)
    for tokens, slots in ((23, 1), (24, 2)):  # the last stretch has 16 tokens
        engine.side.retention.pin_record(key("00" * 32), tokens, leading=False)
        assert engine.side.directory.kept_space() == Space(3, slots, slots * HEADS)
        engine.side.retention.unpin_record(key("00" * 32))
    engine.side.retention.pin_record(key("00" * 32), 24, leading=True)
    assert engine.side.directory.kept_space() == Space(3, 1, 0)


DAMAGE: dict[str, Callable[[SegmentDirectory, Entry], object]] = {
    "users miscounted": lambda books, record: books._pages.use(record.pages[:1]),
    "page used and free": lambda books, record: books._pages._free.append(record.pages[0]),
    "page lost": lambda books, record: books._pages._free.pop(),
    "slot lost": lambda books, record: books.slots._free.pop(),
    "transition block lost": lambda books, record: setattr(books, "free_transition_blocks", 1),
    "negative pins": lambda books, record: setattr(record, "pins", -1),
    "spare kept": lambda books, record: setattr(reserve(books, "b"), "resident", True),
    "spare slot free": lambda books, record: books.slots._free.append(reserve(books, "b").scratch_slot.slot),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_integrity_check_finds_planted_damage(books: SegmentDirectory, damage: str) -> None:
    record, _ = made_with_checkpoint(books)
    DAMAGE[damage](books, record)
    with pytest.raises(RuntimeError, match="public pool"):
        books.check_integrity()


def test_a_record_that_is_resumed_while_used_is_counted_until_it_is_not(books: SegmentDirectory) -> None:
    """The prefix of one prompt is a checkpoint of a longer one."""
    first = reserve(books, "a/8", Need(8))
    books.commit(first)
    longer = reserve(books, "a", Need(16))
    books.resume(longer, first)
    books.check_integrity()
    books.release([first])
    books.release([first])
    books.check_integrity()
    end(books, longer)
    assert books.held_by("") == Space()
