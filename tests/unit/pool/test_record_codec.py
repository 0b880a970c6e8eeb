"""Records to bytes and back: bit for bit, at any place, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.pool import states
from vllm_hypic.pool.codec import IncomingRecord, RankPart, RecordCodec
from vllm_hypic.pool.copy import mover_of
from vllm_hypic.pool.geometry import FP8, AttentionGeometry, PoolGeometry
from vllm_hypic.pool.narrow_states import NarrowRecords
from vllm_hypic.pool.paged_states import PagedRecords
from vllm_hypic.pool.plans import RecordPlace, StoredBase
from vllm_hypic.pool.tensors import DevicePool, KeptRecords, LinearRecords
from vllm_hypic.pool.transition_blocks import NO_BLOCK
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.store.protocol import Verdict
from vllm_hypic.store.record import record_nbytes, seal_record

PAGE, PAGES, SLOTS, HEADS = 4, 12, 3, 3
KEY = SegmentKey("ab" * 32)
ATTENTION = tuple(
    AttentionGeometry(f"layers.{i}.attn", 2, 6, dtype) for i, dtype in ((1, torch.bfloat16), (3, FP8))
)
LINEAR = tuple(states.LinearGeometry(f"layers.{i}.gdn", HEADS, 4, 5, 3, 7, torch.bfloat16) for i in (0, 2))
CONV = states.ConvGeometry("layers.1.conv", 2, 9, torch.bfloat16)
DECAY = states.DecayGeometry("layers.3.mamba", 4, 6, 5, 3, 8, torch.bfloat16)
DIAGONAL = states.DiagonalGeometry("layers.4.mamba", 6, 5, 3, torch.bfloat16)
MIXED = (LINEAR[0], CONV, LINEAR[1], DECAY, DIAGONAL)
"""No model has them all, but nothing rests on that."""
NARROW = tuple(replace(layer, state_dtype=torch.float16) for layer in MIXED)


def pool_of(
    attention: bool = True, linear: tuple[states.StateGeometry, ...] = LINEAR, in_pages: bool = False
) -> DevicePool:
    """``in_pages``: states lie in pages behind the first ``PAGES``."""
    geometry = PoolGeometry(ATTENTION if attention else (), linear, PAGE, PAGES, SLOTS, transition_blocks=24)
    if in_pages:
        each = geometry.with_states_in_pages().state_pages
        geometry = replace(geometry, pages=PAGES + SLOTS * each, state_pages=each)
    pool = DevicePool(geometry, torch.device("cpu"))
    pool.take({slot: range(PAGES + slot, geometry.pages, SLOTS) for slot in range(SLOTS)})
    for tensor in tensors(pool):
        if tensor.numel():
            tensor.view(torch.uint8).random_(0, 256)
    return pool


def tensors(pool: DevicePool) -> Iterator[torch.Tensor]:
    for kv in pool.kv.values():
        yield from (kv.key, kv.value)
    for records in pool.linear.values():
        yield from (part for part in records.parts if isinstance(part, torch.Tensor))
    yield pool.transition_blocks.storage


def place(slot: int, pages: list[int], columns: int, leading: bool = False) -> RecordPlace:
    slots = (np.asarray(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:columns]
    return RecordPlace(7, KEY, slot, slots.astype(np.int64), leading, 10, 1e9)


def codec_of(pool: DevicePool, part: RankPart | None = None, model: str = "m") -> RecordCodec:
    return RecordCodec(pool, Namespace.from_config({"model": model}), part or RankPart(), mover_of(pool))


def settle(pool: DevicePool, at: RecordPlace, dead: set[int]) -> None:
    """As a capture leaves it: a transition block for every live head."""
    if at.leading:
        return
    pool.transition_blocks.offer(at.slot)
    for block_of in pool.transition_blocks.block_of:
        for head in dead if block_of.numel() else ():
            block_of[at.slot, head] = NO_BLOCK
    pool.transition_blocks.settle(at.slot)


def written(codec: RecordCodec, at: RecordPlace) -> memoryview:
    header = codec.header(at)
    buffer = memoryview(np.full(record_nbytes(header), 0xA5, np.uint8))
    filled: list[str] = []
    codec.mover.write(at, header, buffer, filled.append)
    assert filled == [""]
    seal_record(buffer)
    return buffer


def contents(pool: DevicePool, at: RecordPlace) -> list[torch.Tensor]:
    """Everything that a request reads of the record."""
    slots = torch.from_numpy(at.slot_mapping)
    parts = [t.view(torch.uint8)[slots] for kv in pool.kv.values() for t in (kv.key, kv.value)]
    for records in pool.linear.values():
        parts += [torch.as_tensor(part[at.slot]) for part in records.parts]
        parts += [] if at.leading else transition(records, at.slot)
    return parts


def transition(records: KeptRecords, slot: int) -> list[torch.Tensor]:
    """Of layers that have any."""
    if isinstance(records, PagedRecords):
        records, slot = records.read(torch.tensor([slot])), 0
    wide = records.kept if isinstance(records, NarrowRecords) else records
    return [wide.transition(slot)] if isinstance(wide, LinearRecords) else []


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def unchanged(pool: DevicePool) -> Iterator[None]:
    before = [t.clone() for t in tensors(pool)]
    yield
    assert same(list(tensors(pool)), before)


@given(
    columns=st.integers(1, 3 * PAGE),
    dead=st.sets(st.integers(0, HEADS - 1)),
    leading=st.booleans(),
    kinds=st.sampled_from(
        [
            *((True, LINEAR), (True, ()), (False, LINEAR), (True, (CONV,)), (False, (CONV,))),
            *((True, (DECAY,)), (False, (DECAY,)), (True, MIXED), (True, NARROW)),
            *((True, LINEAR, True), (True, MIXED, True), (True, NARROW, True)),
        ]
    ),
    pages=st.permutations(range(PAGES)),
)
def test_round_trip_to_another_place(
    columns: int, dead: set[int], leading: bool, kinds: tuple[Any, ...], pages: list[int]
) -> None:
    pool = pool_of(*kinds)
    source, target = place(0, pages[:3], columns, leading), place(2, pages[3:6], columns, leading)
    settle(pool, source, dead)
    codec = codec_of(pool)
    data = written(codec, source)
    expected = codec.expected(target)
    assert len(data) <= expected.max_nbytes
    before = contents(pool, source)
    if not leading:
        pool.transition_blocks.offer(target.slot)
    others = torch.from_numpy(place(0, pages[6:], 6 * PAGE).slot_mapping)
    untouched = [kv.value.view(torch.uint8)[others] for kv in pool.kv.values()]
    assert codec.reader(target, expected)(data) is Verdict.TAKEN
    if not leading:
        live = (HEADS - len(dead)) * sum(g.blocks > 0 for g in pool.geometry.linear)
        assert pool.transition_blocks.settle(target.slot) == live
    assert same(contents(pool, target), before) and same(contents(pool, source), before)
    assert same([kv.value.view(torch.uint8)[others] for kv in pool.kv.values()], untouched), "others changed"


STORED: dict[states.StateGeometry, dict[str, tuple[str, tuple[int, ...]]]] = {
    CONV: {"conv": ("bfloat16", (2, 9))},
    DECAY: {
        "state": ("float32", (4, 6, 5)),
        "conv": ("bfloat16", (3, 8)),
        "log_transition": ("float32", (4,)),
    },
    DIAGONAL: {"state": ("float32", (6, 5)), "conv": ("bfloat16", (3, 6)), "elapsed": ("float32", (6,))},
}


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("layer", STORED, ids=lambda layer: type(layer).__name__)
def test_what_a_layer_without_transition_blocks_stores(layer: states.StateGeometry, leading: bool) -> None:
    header = codec_of(pool_of(False, (layer,))).header(place(0, [0], 4, leading))
    stored = [(f"{layer.layer}.{part}", *told) for part, told in STORED[layer].items()]
    assert [(s.name, s.dtype, s.shape) for s in header.sections] == stored


def test_fp8_and_a_narrow_state_are_stored_as_they_are() -> None:
    pool = pool_of(True, (NARROW[0],))
    sections = {s.name: (s.dtype, s.shape) for s in codec_of(pool).header(place(0, [0], 4, True)).sections}
    assert sections["layers.1.attn.k"] == ("bfloat16", (4, 2, 6))
    assert sections["layers.3.attn.k"] == sections["layers.3.attn.v"] == ("float8_e4m3fn", (4, 2, 6))
    assert sections["layers.0.gdn.state"] == ("float16", (HEADS, 4, 5))
    assert sections["layers.0.gdn.exponent"] == ("int8", (HEADS,))


def test_dead_heads_take_no_bytes() -> None:
    pool = pool_of()
    settle(pool, place(0, [0], 4), set())
    settle(pool, place(1, [1], 4), {0, 2})
    codec = codec_of(pool)
    block = LINEAR[0].key_dim ** 2 * 2
    saved = len(written(codec, place(0, [0], 4))) - len(written(codec, place(1, [1], 4)))
    assert abs(saved - 2 * len(LINEAR) * block) < 64 * 2 * len(LINEAR)  # but for alignment


@pytest.mark.parametrize(
    ("change", "codec_args"),
    [
        ({"key": SegmentKey("cd" * 32)}, {}),
        ({"slot_mapping": np.arange(5)}, {}),
        ({"leading": True}, {}),
        ({}, {"part": RankPart(1, 2)}),
        ({}, {"model": "another"}),
    ],
    ids=["key", "length", "role", "rank", "model"],
)
def test_another_record_is_refused_and_nothing_is_written(change: dict, codec_args: dict) -> None:
    pool = pool_of()
    source = place(0, [0], 4)
    settle(pool, source, {1})
    data = written(codec_of(pool), source)
    target = replace(place(2, [3, 4], 4), **change)
    pool.transition_blocks.offer(target.slot)
    reader = codec_of(pool, **codec_args)
    with unchanged(pool):
        assert reader.reader(target, reader.expected(target))(data) is Verdict.FOREIGN


def test_every_flipped_byte_is_refused_and_nothing_is_written() -> None:
    pool = pool_of()
    source, target = place(0, [0, 1], 6), place(2, [3, 4], 6)
    settle(pool, source, {1})
    codec = codec_of(pool)
    data = written(codec, source)
    pool.transition_blocks.offer(target.slot)
    read = codec.reader(target, codec.expected(target))
    with unchanged(pool):
        for at in range(0, len(data), 7):
            data[at] ^= 0x10
            assert read(data) is not Verdict.TAKEN, at
            data[at] ^= 0x10
    assert read(data) is Verdict.TAKEN


@pytest.mark.parametrize("live", [[1, 1, 1], [0, 0, 0], [2, 0, 0], [1, 0, 0]])
def test_marks_that_disagree_with_the_transitions_are_refused(live: list[int]) -> None:
    """A sealed record with two transitions a layer whose marks say otherwise."""
    pool = pool_of()
    source, target = place(0, [0], 4), place(2, [3], 4)
    settle(pool, source, {1})
    codec = codec_of(pool)
    header = codec.header(source)
    buffer = memoryview(np.zeros(record_nbytes(header), np.uint8))
    codec.mover.write(source, header, buffer, lambda fault: None)
    at = bytes(buffer).find(bytes([1, 0, 1]))
    assert at > 0
    buffer[at : at + 3] = bytes(live)
    seal_record(buffer)
    pool.transition_blocks.offer(target.slot)
    with unchanged(pool):
        assert codec.reader(target, codec.expected(target))(buffer) is Verdict.DAMAGED


OTHER, THIRD = SegmentKey("cd" * 32), SegmentKey("ef" * 32)


def resting(columns: int) -> tuple[RecordPlace, RecordPlace, RecordPlace]:
    """A short record, a grown one on that, and a checkpoint of the grown one: states, and no columns."""
    pages = [4, 2, 7, 0]
    short = replace(place(0, pages, 6, leading=True), key=OTHER)
    grown = replace(place(1, pages, 13, leading=True), base=StoredBase((OTHER,), 6, 6, 4e8))
    inside = replace(place(2, pages, columns, leading=True), key=THIRD, base=StoredBase((KEY, OTHER), 9))
    return short, grown, inside


def elsewhere(at: RecordPlace) -> RecordPlace:
    columns = len(at.slot_mapping)
    return replace(at, slot=1, slot_mapping=place(1, [9, 1, 3, 11], columns).slot_mapping, base=None)


def read_on(incoming: IncomingRecord, objects: dict[SegmentKey, memoryview]) -> list[SegmentKey]:
    """All that the record rests on; the keys that were read."""
    while incoming.goes_on:
        assert incoming.next is not None
        assert incoming.read(objects[incoming.next]) is Verdict.TAKEN
    return incoming.read_keys


@pytest.mark.parametrize("attention", [True, False])
def test_columns_are_read_of_those_that_a_record_rests_on(attention: bool) -> None:
    pool = pool_of(attention)
    short, grown, inside = places = resting(9)
    objects = {at.key: written(codec_of(pool), at) for at in places}
    whole = {at.key: written(codec_of(pool), replace(at, base=None)) for at in places}
    if attention:
        assert objects[KEY].nbytes < whole[KEY].nbytes and objects[THIRD].nbytes < whole[THIRD].nbytes
    for at, chain in ((grown, [KEY, OTHER]), (inside, [THIRD, KEY, OTHER]), (short, [OTHER])):
        other, to = pool_of(attention), elsewhere(at)
        incoming = codec_of(other).incoming(to)
        assert incoming.read(objects[at.key][:-1]) is Verdict.DAMAGED
        assert read_on(incoming, objects) == chain and incoming.next is None
        assert written(codec_of(other), to) == whole[at.key]


@pytest.mark.parametrize(
    ("there", "chain"), [(0, [THIRD, KEY, OTHER]), (4, [THIRD, KEY, OTHER]), (8, [THIRD, KEY])]
)
def test_columns_that_the_pool_has_are_not_written(there: int, chain: list[SegmentKey]) -> None:
    """Nor is what has them alone read."""
    pool, other = pool_of(), pool_of()
    places = resting(11)
    objects = {at.key: written(codec_of(pool), at) for at in places}
    inside, to = places[-1], elsewhere(places[-1])
    first = torch.from_numpy(to.slot_mapping[:there])
    kv = [t.view(torch.uint8) for found in other.kv.values() for t in (found.key, found.value)]
    before = [t[first].clone() for t in kv]
    incoming = codec_of(other).incoming(replace(to, base=StoredBase((), there)))
    assert read_on(incoming, objects) == chain and incoming.next is None
    assert same([t[first] for t in kv], before)
    whole, found = (contents(p, at) for p, at in ((pool, inside), (other, to)))
    assert same([t[there:] for t in whole[: len(kv)]], [t[there:] for t in found[: len(kv)]])
    assert same(whole[len(kv) :], found[len(kv) :])


def test_records_that_rest_on_each_other_are_not_read_for_ever() -> None:
    pool = pool_of()
    one = replace(place(0, [1, 2], 8, leading=True), base=StoredBase((OTHER,), 6))
    other = replace(place(1, [1, 2], 8, leading=True), key=OTHER, base=StoredBase((KEY,), 6))
    incoming = codec_of(pool_of()).incoming(replace(one, base=None))
    assert read_on(incoming, {at.key: written(codec_of(pool), at) for at in (one, other)}) == [KEY, OTHER]
    assert incoming.next is not None, "it was not taken"
