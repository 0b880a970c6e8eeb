"""The handler of commands, which keeps records in step with the segment registry."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_hypic.cache_api import handler as handler_module
from vllm_hypic.cache_api.answers import CacheStats, Place, Segment, SegmentPage, Weights
from vllm_hypic.cache_api.commands import (
    MOST_IDS,
    MOST_RESOLVED,
    Change,
    Command,
    Compile,
    Delete,
    Failure,
    NameWeights,
    Page,
    Report,
    Resolve,
    Resolved,
    Show,
    is_command,
    pack,
    take_command,
    unpack,
)
from vllm_hypic.cache_api.control import CommandFailed, Control
from vllm_hypic.cache_api.handler import CommandHandler
from vllm_hypic.cache_api.registry import RegistryError, SegmentRegistry

from .conftest import KEY, NAMESPACE, OTHER_KEY, Clock


@dataclass
class Records:
    """Records of a store that notes what is done to it."""

    present: set[str] = field(default_factory=lambda: {KEY, OTHER_KEY})
    pinned: set[str] = field(default_factory=set)
    expiry: dict[str, float | None] = field(default_factory=dict)
    room: int = 1
    sizes: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """What was said of records when they were pinned: always the same."""
    tenants: dict[str, str] = field(default_factory=dict)
    """Who pinned them."""

    def pin_record(self, key, tokens, *, leading, tenant):
        assert (tokens, leading) == self.sizes.setdefault(key, (tokens, leading))
        self.tenants[key] = tenant
        if key not in self.pinned and len(self.pinned) >= self.room:
            raise ValueError("the pool is full of pinned records")
        self.pinned.add(key)

    def unpin_record(self, key):
        self.pinned.discard(key)

    def drop_record(self, key):
        self.present.discard(key)
        self.pinned.discard(key)
        self.expiry.pop(key, None)

    def expire_record(self, key, at):
        self.expiry[key] = at

    def record_state(self, key):
        return SimpleNamespace(resident=key in self.present, pending=False, nbytes=100, stored=False)

    def pool_stats(self):
        return {"objects": 2.0}

    def store_stats(self):
        return {"disk": {"hits": 1.0}}


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def handler(registry: SegmentRegistry, records: Records, clock: Clock) -> CommandHandler:
    return CommandHandler(lambda: registry, records, str, clock)


def compiled(handler, tokens, key=KEY, salt="me", place=Place.INTERIOR, **options):
    return handler.compiled(Compile(place, **options), tokens, key, salt)


def test_an_owner_has_no_more_segments_than_it_may(clock):
    registry = SegmentRegistry(None, NAMESPACE, clock, most=2)
    handler = CommandHandler(lambda: registry, Records(), str, clock)
    known = compiled(handler, [1], None)
    compiled(handler, [2], None, ttl_s=5.0)
    refused = compiled(handler, [3], None)
    assert isinstance(refused, Failure) and refused.status == 507
    assert "this tenant has 2 segments: expected at most 2 (max_tenant_segments)" in refused.message
    assert compiled(handler, [1], None).id == known.id, "it is there already"
    assert isinstance(compiled(handler, [3], None, salt="you"), Segment), "everybody has as many"
    clock.now += 6
    assert isinstance(compiled(handler, [3], None), Segment), "what has expired does not count"
    handler.execute(Delete(known.id), "me")
    assert isinstance(compiled(handler, [4], None), Segment)
    registry.close()


def test_compile_show_list_resolve_delete(handler, records, registry):
    segment = compiled(handler, [1, 2, 3], text="abc")
    assert isinstance(segment, Segment) and segment.resident and segment.bytes == 100
    assert handler.execute(Show(segment.id), "me") == segment
    shown = handler.execute(Show(segment.id, content=True), "me")
    assert (shown.text, shown.token_ids) == ("abc", (1, 2, 3))
    assert handler.execute(Page("", 10), "me") == SegmentPage([segment], None)
    resolved = handler.execute(Resolve([segment.id, "nobody", segment.id]), "me")
    assert isinstance(resolved, Resolved) and resolved.unknown == ["nobody"]
    assert resolved.contents[segment.id].text == "abc"
    state = handler.execute(Report(), None)
    assert isinstance(state, CacheStats) and state.segments == 1
    assert state.tiers == {"pool": {"objects": 2.0}, "disk": {"hits": 1.0}}
    assert handler.execute(Delete(segment.id), "me").id == segment.id and KEY not in records.present
    assert handler.execute(Show(segment.id), "me").status == 404
    assert records.expiry == {}, "without a ttl the store's own rules hold"
    named = []
    handler = CommandHandler(lambda: registry, records, str, name_weights=named.append)
    assert handler.execute(NameWeights("step-2"), None) == Weights("step-2") and named == ["step-2"]


@pytest.mark.parametrize(
    "command", [Show("ID"), Change("ID", 5.0), Delete("ID")], ids=lambda c: type(c).__name__
)
def test_foreign_and_unknown_ids_get_the_same_answer(handler, records, command):
    segment = compiled(handler, [1])
    for segment_id in (segment.id, "A" * 32):
        refused = handler.execute(type(command)(segment_id), "you")
        assert refused == Failure(404, f"segment {segment_id!r} is unknown or has expired", segment_id)
    assert KEY in records.present
    assert handler.execute(Resolve([segment.id]), "you").unknown == [segment.id]


def test_time_to_live(handler, records, clock):
    segment = compiled(handler, [1], ttl_s=60.0)
    assert segment.expires == 1060 and records.expiry == {KEY: 1060}
    clock.now = 1030
    assert compiled(handler, [1]).expires == 1060, "compiling again without a ttl leaves it"
    assert handler.execute(Change(segment.id, ttl_s=100.0), "me").expires == records.expiry[KEY] == 1130
    assert handler.execute(Change(segment.id, ttl_s=None), "me").expires is records.expiry[KEY] is None
    handler.execute(Change(segment.id, ttl_s=1.0), "me")
    clock.now = 1031
    assert handler.execute(Show(segment.id), "me").status == 404 and KEY not in records.present


def test_pins(handler, records, clock):
    segment = compiled(handler, [1], pin=True, ttl_s=10.0)
    assert segment.pinned and records.pinned == {KEY}
    refused = compiled(handler, [2], OTHER_KEY, pin=True)
    assert isinstance(refused, Failure) and refused.status == 409
    assert "the pool is full of pinned records" in refused.message and refused.id in refused.message
    assert not handler.execute(Show(refused.id), "me").pinned, "compiled, but not pinned"
    assert not handler.execute(Change(segment.id, unpin=True), "me").pinned and records.pinned == set()
    compiled(handler, [1], pin=True)
    clock.now += 10
    handler.execute(Report(), None)
    assert records.pinned == set(), "an expired segment pins nothing"
    segment = compiled(handler, [1], key=None)
    assert isinstance(segment, Segment) and segment.key is None and not segment.resident
    assert "has no record" in compiled(handler, [1], key=None, pin=True).message


def test_a_record_stays_while_another_entry_wants_it(handler, records):
    """The same tokens leading a prompt and a chat are one record."""
    prompt = compiled(handler, [1, 2], place=Place.PROMPT, pin=True, ttl_s=50.0)
    chat = compiled(handler, [1, 2], place=Place.CHAT)
    assert records.expiry[KEY] is None, "the one without a ttl decides"
    handler.execute(Delete(chat.id), "me")
    assert KEY in records.present and records.pinned == {KEY}
    handler.execute(Delete(prompt.id), "me")
    assert KEY not in records.present and records.pinned == set()


def test_pins_and_ttls_are_in_force_after_a_restart(tmp_path, clock, handler, records, registry):
    # Pins are their tenants'.
    compiled(handler, [1], salt="you", pin=True)
    restarted = Records()
    CommandHandler(lambda: registry, restarted, str, clock).start()
    assert records.tenants == restarted.tenants == {KEY: "you"}
    # A pool that is smaller after the restart takes the first pin alone.
    opened = SegmentRegistry(tmp_path, NAMESPACE, clock)
    handler = CommandHandler(lambda: opened, Records(room=2), str, clock)
    first = compiled(handler, [1], KEY, pin=True, ttl_s=500.0)
    clock.now += 1
    second = compiled(handler, [2], OTHER_KEY, pin=True)
    opened.close()
    records = Records(sizes={KEY: (1, False), OTHER_KEY: (1, False)})  # of a smaller pool: room for one
    handler = CommandHandler(lambda: SegmentRegistry(tmp_path, NAMESPACE, clock), records, str, clock)
    handler.start()
    assert records.pinned == {KEY} and records.expiry == {KEY: 1500}
    assert handler.execute(Show(first.id), "me").pinned
    assert not handler.execute(Show(second.id), "me").pinned, "a pin that is not in force is not shown"


def test_a_failing_registry_fails_commands_only_and_is_tried_again(clock, caplog):
    broken = True

    def opened() -> SegmentRegistry:
        if broken:
            raise RegistryError("disk on fire")
        return SegmentRegistry(None, NAMESPACE, clock)

    handler = CommandHandler(opened, Records(), str, clock)
    handler.start()
    assert "disk on fire" in caplog.text
    for answer in (handler.execute(Page("", 1), None), compiled(handler, [1])):
        assert isinstance(answer, Failure) and answer.status == 503 and "disk on fire" in answer.message
    broken = False
    assert isinstance(compiled(handler, [1]), Segment)


def test_commands_and_answers_survive_the_way_to_the_engine_and_back(handler):
    commands: list[Command] = [
        Compile(Place.CHAT, text="x", bare_from=1, ttl_s=None, pin=True),
        *(Compile(Place.INTERIOR), Show("a", content=True), Page("", 3), Delete("a"), Report()),
        *(Change("a"), Change("a", ttl_s=None, unpin=True), Resolve(["a", "b"]), NameWeights("step-2")),
    ]
    for command in commands:
        packed = msgspec.msgpack.encode({"hypic_command": command, "hypic_link": "block"})
        assert take_command(msgspec.msgpack.decode(packed)) == (command, {"hypic_link": "block"})
    assert take_command({"other": 1}) == (None, {"other": 1})
    segment = compiled(handler, [1])
    assert unpack(pack(segment), Segment) == segment
    failure = Failure(404, "gone", "a")
    assert unpack(pack(failure), Segment) == failure
    with pytest.raises(RuntimeError, match="expected Resolved"):
        unpack(pack(segment), Resolved)


def test_damaged_commands_are_refused():
    damages = "report", 7, {"op": "fire"}, {"op": "show"}, {"op": "show", "id": 5}, {"op": "report", "x": 1}
    for damaged in damages:
        assert not is_command(damaged)
        refused, others = take_command({"hypic_command": damaged, "other": 1})
        assert isinstance(refused, Failure) and refused.status == 400 and "hypic_command" in refused.message
        assert others == {"other": 1}


def test_answers_wait_for_the_end_of_their_requests(handler):
    """A command is executed when it comes, a segment gets its id when it is warm."""
    handler.submit("report", Report(), "me")
    handler.submit("refused", Failure(400, "no"), "me")
    handler.submit_compile("warm", Compile(Place.INTERIOR), [1, 2], KEY, "me")
    handler.submit_compile("gone", Compile(Place.INTERIOR), [3], OTHER_KEY, "me")
    handler.forget("gone")
    assert handler.take_answer("gone") is None and handler.take_answer("no command") is None
    assert unpack(handler.take_answer("refused"), CacheStats) == Failure(400, "no")
    assert unpack(handler.take_answer("report"), CacheStats).segments == 0, "before the segment was warm"
    segment = unpack(handler.take_answer("warm"), Segment)
    assert segment.tokens == 2 and handler.execute(Show(segment.id), "me") == segment
    assert handler.take_answer("warm") is None


# -- requests with many ids: each step of the engine looks up a bounded number of them ---------------


class Line(Control):
    """To a handler in this process, without an engine between."""

    def __init__(self, handler: CommandHandler) -> None:
        self.handler = handler
        self.looked_up: list[int] = []
        """Ids of each command that were looked up."""

    async def send(self, command: Any, wanted: Any, salt: str | None) -> Any:
        answer = unpack(pack(self.handler.execute(command, salt)), wanted)
        self.looked_up.append(len(answer.contents) + len(answer.unknown))
        return answer


@pytest.fixture
def line(registry: SegmentRegistry) -> Line:
    return Line(CommandHandler(lambda: registry, Records(), str))


def ids_of(registry: SegmentRegistry, count: int, n_tokens: int = 3) -> list[str]:
    return [registry.add("me", Place.INTERIOR, [i] * n_tokens, text=f"text {i}").id for i in range(count)]


def test_one_step_looks_up_so_many_ids(registry: SegmentRegistry, line: Line) -> None:
    ids = ids_of(registry, 3 * MOST_RESOLVED)
    found = line.handler.execute(Resolve(ids), "me")
    assert isinstance(found, Resolved) and list(found.contents) == ids[:MOST_RESOLVED]
    unknown = line.handler.execute(Resolve([f"no {i}" for i in range(1000)]), "me")
    assert isinstance(unknown, Resolved) and len(unknown.unknown) == MOST_RESOLVED
    ids = ids[: 2 * MOST_RESOLVED + 7]
    found = asyncio.run(line.resolve(ids, "me"))
    assert [c.text for c in found.contents.values()] == [f"text {i}" for i in range(len(ids))]
    assert line.looked_up == [MOST_RESOLVED, MOST_RESOLVED, 7]


def test_long_segments_are_fewer_and_never_none(registry, line, monkeypatch):
    monkeypatch.setattr(handler_module, "MOST_RESOLVED_TOKENS", 100)
    ids = ids_of(registry, 5, n_tokens=60)
    assert list(asyncio.run(line.resolve(ids, "me")).contents) == ids and line.looked_up == [2, 2, 1]
    line.looked_up.clear()
    longer = ids_of(registry, 2, n_tokens=1000)
    assert list(asyncio.run(line.resolve(longer, "me")).contents) == longer and line.looked_up == [1, 1]


def test_unknown_and_too_many_ids_end_it(registry: SegmentRegistry, line: Line) -> None:
    ids = ids_of(registry, 3 * MOST_RESOLVED)
    ids[MOST_RESOLVED + 1] = "nobody"
    assert asyncio.run(line.resolve(ids, "me")).unknown == ["nobody"]
    assert len(line.looked_up) == 2
    assert len(asyncio.run(line.resolve(ids, "you")).unknown) == MOST_RESOLVED
    says = f"{MOST_IDS + 1} segment ids .*: expected at most {MOST_IDS}"
    with pytest.raises(CommandFailed, match=says) as refused:
        asyncio.run(line.resolve([f"id {i}" for i in range(MOST_IDS + 1)], "me"))
    assert refused.value.status == 400 and len(line.looked_up) == 3
