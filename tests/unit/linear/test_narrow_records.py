"""Records with a narrow S under programs of layers: captured and composed against the float64 reference.

S has one rounding of float16 more, half a step of an element: 2^-11.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_hypic.backends.linear.copied import capturing, reading
from vllm_hypic.backends.linear.layout import Composed, Segments
from vllm_hypic.backends.ops.gated_delta import DEAD_BELOW, reference
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.narrow_states import NarrowRecords
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.step import StepContext
from vllm_hypic.pool.tensors import DevicePool, LinearRecords

from .layer_inputs import SLOTS, Layer, Segment, Shape, every_kind_composed, segment_program
from .layers import relative
from .test_layer_operators import GATES, HALF_STEP, MODULES, bound, run_compose, run_segments

NAME = "layer"
SHAPE = Shape(2, 4, 32, 48)
STEP = StepContext([], [], torch.device("cpu"))


class World:
    """A layer whose records are a pool's, narrow."""

    def __init__(self, layer: Layer) -> None:
        s = layer.shape
        geometry = LinearGeometry(
            NAME, s.heads, s.K, s.V, s.taps - 1, s.channels, layer.x.mixed.dtype, state_dtype=torch.float16
        )
        sizes = PoolGeometry((), (geometry,), 4, 0, SLOTS, transition_blocks=SLOTS * s.heads)
        pool = DevicePool(sizes, torch.device("cpu"))
        self.layer, self.runtime = layer, HypicRuntime(pool, DEAD_BELOW)
        found = pool.linear[NAME]
        assert isinstance(found, NarrowRecords)
        self.records = found
        for slot in range(SLOTS):
            pool.transition_blocks.offer(slot)

    @contextmanager
    def lent(self, how: Any, program: Any) -> Iterator[Any]:
        """``program`` as ``how`` has it run, over the records that are lent for it."""
        with how(self.runtime, STEP, NAME, program) as made:
            self.layer.records = self.runtime.pool.records(NAME, LinearRecords)
            yield made

    def segments(self, module: ModuleType, rows: torch.Tensor) -> None:
        with self.lent(capturing, Segments(rows, (), (), ())) as program:
            self.layer.segments(module, program.rows)

    def compose(self, module: ModuleType, rows: torch.Tensor, ops: torch.Tensor, shifts: None) -> None:
        with self.lent(reading, Composed(rows, ops, torch.zeros(len(ops)))) as program:
            self.layer.compose(module, program.rows, program.ops, shifts)


@pytest.mark.parametrize("cuts", [[], [40], [5, 199]])
@GATES
@MODULES
def test_segments(module: ModuleType, channel_gates: bool, cuts: list[int]) -> None:
    """Three at once in slots that are no order of theirs, a leading one among them, whole and in passes."""
    layer = Layer.make(replace(SHAPE, channel_gates=channel_gates), 250)
    leading = Segment(1, 230, 20, 0, 20, 4, True)
    segments = [Segment(0, 0, 200, 8, 192, 6), Segment(2, 200, 30, 0, 30, 1), leading]
    exact = layer.exact()
    run_segments(reference, exact, segments)
    world = World(layer)
    run_segments(module, world, segments, cuts)
    found = world.records.read(torch.tensor([s.slot for s in segments]))
    assert isinstance(found, LinearRecords)
    for number, s in enumerate(segments):
        assert relative(found.state[number], exact.records.state[s.slot]) < bound(layer) + HALF_STEP
        assert torch.equal(found.conv_tail[number], exact.records.conv_tail[s.slot])
        if not s.leading:
            error = found.transition(number).double() - exact.transition(s.slot)
            assert error.abs().max() < HALF_STEP
        assert (found.block_of[number] < 0).tolist() == (exact.records.block_of[s.slot] < 0).tolist()
    others = [slot for slot in range(SLOTS) if slot not in {s.slot for s in segments}]
    assert not world.records.kept.parts[0][others].any()


@GATES
@MODULES
def test_compose(module: ModuleType, channel_gates: bool) -> None:
    shape = replace(SHAPE, channel_gates=channel_gates)
    layer, requests = every_kind_composed(shape, torch.float32, added=90, query=30)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    world, given = World(layer), layer.records
    slots = torch.arange(4)
    room = world.records.room(slots)
    assert isinstance(room, LinearRecords)
    for name in ("state", "conv_tail", "block_of"):
        getattr(room, name)[:] = getattr(given, name)[:4]
    room.transitions[:] = given.transitions
    world.records.write(slots, room, slots)
    run_compose(module, world, requests)
    for row, _, operations in requests:
        assert relative(layer.state(row), exact.state(row)) < bound(layer) + HALF_STEP, row
        for at, count, *_ in operations:
            if count:
                wanted = exact.outputs(at, at + count)
                size = wanted.norm() + exact.state(row).norm() * shape.K**-0.5
                assert (layer.outputs(at, at + count) - wanted).norm() < 2 * HALF_STEP * size, (row, at)


def test_records_are_lent_for_one_call() -> None:
    world = World(Layer.make(SHAPE, 20))
    program = Segments(segment_program([Segment(0, 0, 20, 0, 20, 3)]), (), (), ())
    with pytest.raises(AssertionError):
        world.runtime.pool.records(NAME, LinearRecords)
    before = [part.clone() for part in world.records.parts]

    def breaks() -> None:
        with capturing(world.runtime, STEP, NAME, program):
            world.runtime.pool.records(NAME, LinearRecords).state.fill_(1.0)
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        breaks()
    assert all(torch.equal(a, b) for a, b in zip(world.records.parts, before, strict=True))
    with pytest.raises(AssertionError):
        world.runtime.pool.records(NAME, LinearRecords)
