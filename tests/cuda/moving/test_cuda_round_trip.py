"""Records out of the pool and back to another place.  On a GPU, where there is one, with its own stream."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy import mover_of
from vllm_hypic.pool.copy.base import RecordMover
from vllm_hypic.pool.copy.staged import StagedMover
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import RecordPlace, StoredBase
from vllm_hypic.pool.states import ConvGeometry, DecayGeometry, LinearGeometry
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.pool.transition_blocks import NO_BLOCK
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.store.protocol import Verdict
from vllm_hypic.store.record import aligned_buffer, record_nbytes, seal_record

from .late_device import LateDevice, PoisonedBlocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS, HEADS = 700, 5
ATTENTION = AttentionGeometry("layers.1", 2, 128, torch.bfloat16)
LINEAR = LinearGeometry("layers.0", HEADS, 64, 64, 3, 384, torch.bfloat16)
CONV = ConvGeometry("layers.2", 2, 640, torch.bfloat16)
DECAY = DecayGeometry("layers.3", HEADS, 32, 64, 3, 288, torch.bfloat16)
SLOTS = np.random.default_rng(0).permutation(128).repeat(16) * 16 + np.tile(np.arange(16), 128)
"""Token slots of the pool, in pages of any order."""


def made(slots: int) -> tuple[DevicePool, RecordMover]:
    geometry = PoolGeometry(
        (ATTENTION,), (LINEAR, CONV, DECAY), 16, pages=128, slots=slots, transition_blocks=slots * HEADS
    )
    pool = DevicePool(geometry, DEVICE)
    if DEVICE.type == "cuda":
        return pool, mover_of(pool)
    return pool, StagedMover(pool, LateDevice(0), PoisonedBlocks(12, 100_000))


def tensors(pool: DevicePool) -> list[torch.Tensor]:
    kv, linear = pool.kv["layers.1"], pool.linear["layers.0"]
    states = [part for records in pool.linear.values() for part in records.parts]
    return [kv.key, kv.value, *states, linear.transitions]


def settle(pool: DevicePool, place: RecordPlace) -> None:
    """A record is complete, in which every other head has died out."""
    pool.transition_blocks.offer(place.slot)
    pool.linear["layers.0"].block_of[place.slot, 1::2] = NO_BLOCK
    assert pool.transition_blocks.settle(place.slot) == 3


def parts(pool: DevicePool, place: RecordPlace) -> list[torch.Tensor]:
    """All that a request reads of a record."""
    rows = torch.from_numpy(place.slot_mapping).to(DEVICE)
    kv, linear = pool.kv["layers.1"], pool.linear["layers.0"]
    found = [kv.key[rows], kv.value[rows], linear.state[place.slot], linear.conv_tail[place.slot]]
    found += [part[place.slot] for name in ("layers.2", "layers.3") for part in pool.linear[name].parts]
    return [*found, linear.transition(place.slot)] if not place.leading else found


@pytest.mark.parametrize("leading", [False, True])
def test_there_and_back(leading: bool) -> None:
    pool, mover = made(slots=2)
    codec = RecordCodec(pool, Namespace.from_config({}), RankPart(), mover)
    one, other = (
        RecordPlace(slot, SegmentKey("ab" * 32), slot, SLOTS[first : first + COLUMNS], leading, 1, 1.0)
        for slot, first in ((0, 0), (1, 1024))
    )
    kv, linear = pool.kv["layers.1"], pool.linear["layers.0"]
    if not leading:
        settle(pool, one)
    if DEVICE.type == "cuda":
        # What writes the record is behind in the stream.
        torch.cuda._sleep(100_000_000)
    for tensor in tensors(pool):
        tensor.normal_()
    wanted = [part.clone() for part in parts(pool, one)]

    header = codec.header(one)
    buffer = aligned_buffer(record_nbytes(header))
    filled: list[str] = []
    mover.write(one, header, buffer, filled.append)
    pool.transition_blocks.release([one.slot])
    mover.dropped([one.slot])
    if not leading:
        pool.transition_blocks.offer(other.slot)
    if DEVICE.type == "cuda":
        # Whoever has the place next does not disturb the copies.
        kv.key.zero_(), linear.state.zero_(), linear.transitions.zero_()
    mover.drain()
    assert filled == [""]
    seal_record(buffer)

    assert codec.reader(other, codec.expected(other))(buffer) is Verdict.TAKEN
    kept: list[int] = []
    mover.settle(other, kept.append)
    mover.drain()
    assert kept == [0 if leading else 3]
    for found, part in zip(parts(pool, other), wanted, strict=True):
        assert torch.equal(found, part)


def test_a_checkpoint_of_a_worker_without_states_is_its_header() -> None:
    pool = DevicePool(PoolGeometry((ATTENTION,), (), 16, 128, 4, 0), DEVICE)
    mover = StagedMover(pool, LateDevice(0), PoisonedBlocks(12, 100_000))
    codec = RecordCodec(pool, Namespace.from_config({}), RankPart(), mover)
    base = StoredBase((SegmentKey("ab" * 32),), COLUMNS)
    place = RecordPlace(1, SegmentKey("cd" * 32), 1, SLOTS[:COLUMNS], False, 1, 1.0, base)
    header = codec.header(place)
    buffer, filled = aligned_buffer(record_nbytes(header)), list[str]()
    mover.write(place, header, buffer, filled.append, seal_record)
    mover.drain()
    assert filled == [""] and codec.incoming(replace(place, base=None)).read(buffer) is Verdict.TAKEN


@pytest.mark.parametrize("leading", [True, False], ids=["prefix", "segment"])
def test_a_record_with_checkpoints_there_and_back(leading: bool) -> None:
    """A checkpoint is stored as its states, what grew out of the record with the columns behind those."""
    pool, mover = made(slots=4)
    codec = RecordCodec(pool, Namespace.from_config({}), RankPart(), mover)
    keys = [SegmentKey(name * 32) for name in ("ab", "cd", "ef")]
    record = RecordPlace(0, keys[0], 0, SLOTS[:COLUMNS], leading, 1, 1.0)
    inside, grown = (
        RecordPlace(n, keys[n], n, SLOTS[:columns], leading, 1, 1.0, StoredBase((keys[0],), shared))
        for n, (columns, shared) in enumerate([(450, 450), (COLUMNS + 100, 640)], 1)
    )
    for tensor in tensors(pool):
        tensor.normal_()
    wanted, objects = {}, {}
    for place in (record, inside, grown):
        if not leading:
            settle(pool, place)
        wanted[place.key] = [part.clone() for part in parts(pool, place)]
        header = codec.header(place)
        objects[place.key] = buffer = aligned_buffer(record_nbytes(header))
        mover.write(place, header, buffer, lambda fault: None, seal_record)
    mover.drain()
    states, whole = objects[inside.key].nbytes, objects[record.key].nbytes
    assert whole - states == pytest.approx(COLUMNS * ATTENTION.token_bytes, rel=0.01), "it has columns"
    for place in (record, inside, grown):
        pool.transition_blocks.release([place.slot])
        mover.dropped([place.slot])
    for tensor in tensors(pool):
        tensor.zero_()

    for place, chain in ((grown, [grown, record]), (inside, [inside, record]), (record, [record])):
        columns = len(place.slot_mapping)
        back = replace(place, serial=9, slot=3, slot_mapping=SLOTS[1024 : 1024 + columns], base=None)
        if not leading:
            pool.transition_blocks.offer(back.slot)
        incoming = codec.incoming(back)
        while incoming.goes_on:
            assert incoming.read(objects[incoming.next]) is Verdict.TAKEN
        assert incoming.read_keys == [link.key for link in chain]
        kept: list[int] = []
        mover.settle(back, kept.append)
        mover.drain()
        assert kept == [0 if leading else 3]
        for found, part in zip(parts(pool, back), wanted[place.key], strict=True):
            assert torch.equal(found, part)
