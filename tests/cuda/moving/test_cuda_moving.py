"""Records leave a device that lags, and come back; whatever happens meanwhile, they are whole or absent."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_hypic.pool.copy.copy_thread import CopyThread
from vllm_hypic.pool.copy.staged import StagedMover
from vllm_hypic.pool.copy.staging import Block
from vllm_hypic.pool.copy.stream import Mark
from vllm_hypic.pool.tensors import DevicePool

from .late_device import LateDevice, PoisonedBlocks
from .world import BLOCK_BYTES, BLOCKS, DOCUMENTS, Make, World, staged

SEEDS, STEPS = 20, 250


def live(world: World) -> None:
    """A life of requests, deletions, cleared caches and lags."""
    rng = world.rng
    for _ in range(STEPS):
        if rng.random() < 0.5 and len(world.side.admission.requests) < 6:
            world.ask(rng.sample(range(len(DOCUMENTS)), rng.choice([1, 1, 2, 3])))
        if rng.random() < 0.1:
            world.abort()
        if rng.random() < 0.1:
            world.delete()
        if rng.random() < 0.03:
            world.clear()
        world.step()
    world.finish()
    world.audit()


@pytest.mark.parametrize("make", [None, staged], ids=["host", "staged"])
def test_any_life_leaves_pool_and_store_whole(make: Make | None) -> None:
    loaded = stored = 0
    for seed in range(SEEDS):
        world = World(seed, make)
        live(world)
        loaded += world.side.counters.segments_loaded
        stored += len(world.objects)
    assert loaded > 3 * SEEDS and stored > 3 * SEEDS, "the lives were too short to say anything"


# -- each rule, broken


def with_stream(change: Callable[[LateDevice], None]) -> Make:
    """A mover whose stream of copies is broken."""

    def make(pool: DevicePool, device: LateDevice) -> StagedMover:
        change(device)
        return staged(pool, device)

    return make


def marks_say_done_at_once(device: LateDevice) -> None:
    launch = device.launch

    def lying(work: Callable[[], None]) -> Mark:
        mark = launch(work)
        mark.done = lambda: True
        return mark

    device.launch = lying  # type: ignore[method-assign]


class SharedBlocks(PoisonedBlocks):
    """Blocks are anybody's at any time."""

    def take(self) -> Block | None:
        block = super().take()
        assert block is not None
        super().give_back([block])
        return block

    def give_back(self, blocks: Sequence[Block]) -> None:
        pass


class Forgetful(StagedMover):
    """What was dropped is copied to its end."""

    def dropped(self, slots: Any) -> None:
        pass


class FreesBlocksFirst(StagedMover):
    """A block is anybody's once its copy is done, though the copy thread has yet to read it."""

    def _hand_over(self, departure: Any, chunk: Any, block: Block) -> None:
        super()._hand_over(departure, chunk, block)
        self._blocks.give_back([block])

    def _carry(self, departure: Any, chunk: Any, block: Block) -> None:
        departure.unpack(chunk, block)
        self._carried.append("")


class BelievesTheThread(StagedMover):
    """What the copy thread was given counts as carried."""

    def _hand_over(self, departure: Any, chunk: Any, block: Block) -> None:
        super()._hand_over(departure, chunk, block)
        departure.arrived("")

    def advance(self) -> None:
        super().advance()
        self._carried.clear()


class Marking(StagedMover):
    """The copy thread asks the device whether the copy is done."""

    def _carry(self, departure: Any, chunk: Any, block: Block) -> None:
        assert departure.last.done()
        super()._carry(departure, chunk, block)


def of(mover: type[StagedMover], blocks: type[PoisonedBlocks] = PoisonedBlocks) -> Make:
    return lambda pool, device: mover(pool, device, blocks(BLOCKS, BLOCK_BYTES), CopyThread(threaded=False))


BROKEN = {
    "copy before pass": with_stream(lambda device: setattr(device, "after_passes", lambda: None)),
    "pass before copy": with_stream(lambda device: setattr(device, "before_passes", lambda mark: None)),
    "used before done": with_stream(marks_say_done_at_once),
    "block reused": of(StagedMover, SharedBlocks),
    "dropped, copied on": of(Forgetful),
    "block freed before it was carried": of(FreesBlocksFirst),
    "used before it was carried": of(BelievesTheThread),
    "a thread calls the device": of(Marking),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_every_rule_is_needed(broken: Make) -> None:
    """With any of them broken, some life ends badly."""

    def lives() -> None:
        for seed in range(SEEDS):
            live(World(seed, broken))

    with pytest.raises(AssertionError, match=r"is another's|holds something else|calls the device"):
        lives()
