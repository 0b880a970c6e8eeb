"""Tiles of transitions: none is lost, none has two owners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_hypic.pool.transition_blocks import NONE, LayerTiles, TilePool

CPU = torch.device("cpu")
LAYERS, SLOTS, HEADS = 2, 4, 3


class TileMachine(RuleBasedStateMachine):
    """Records are captured, any heads dead, captured again, and dropped, in two layers over one pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TilePool(LAYERS * SLOTS * HEADS, 2, torch.float16, CPU)
        self.layers = [LayerTiles(self.pool, SLOTS, HEADS, CPU) for _ in range(LAYERS)]
        self.alive: list[dict[int, int]] = [{} for _ in range(LAYERS)]

    @rule(
        layer=st.integers(0, LAYERS - 1),
        slots=st.sets(st.integers(0, SLOTS - 1), min_size=1),
        dead=st.lists(st.booleans(), min_size=SLOTS * HEADS, max_size=SLOTS * HEADS),
    )
    def capture(self, layer: int, slots: set[int], dead: list[bool]) -> None:
        tiles = self.layers[layer]
        tiles.offer(sorted(slots))
        mask = torch.tensor(dead).view(SLOTS, HEADS)
        for slot in slots:
            assert (tiles.tile_of[slot] != NONE).all()
            tiles.tile_of[slot][mask[slot]] = NONE
            self.alive[layer][slot] = int((~mask[slot]).sum())
            assert tiles.settle(slot) == self.alive[layer][slot]

    @rule(layer=st.integers(0, LAYERS - 1), slot=st.integers(0, SLOTS - 1))
    def release(self, layer: int, slot: int) -> None:
        self.layers[layer].release(slot)
        self.alive[layer].pop(slot, None)

    @invariant()
    def every_tile_has_one_owner(self) -> None:
        named = torch.cat([layer.tile_of.flatten() for layer in self.layers])
        named = named[named != NONE]
        assert len(named.unique()) == len(named) == sum(sum(alive.values()) for alive in self.alive)
        assert self.pool.free == LAYERS * SLOTS * HEADS - len(named)
        assert not set(named.tolist()) & set(self.pool._free)


TestTileMachine = TileMachine.TestCase
TestTileMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_more_than_there_are_is_an_error() -> None:
    """Never two owners of one tile."""
    tiles = LayerTiles(TilePool(5, 2, torch.float16, CPU), SLOTS, HEADS, CPU)
    tiles.offer([0])
    with pytest.raises(RuntimeError, match="3 tiles wanted, 2 free"):
        tiles.offer([1])


def test_a_record_without_transitions_needs_none() -> None:
    tiles = LayerTiles(TilePool(5, 2, torch.float16, CPU), SLOTS, HEADS, CPU)
    assert tiles.settle(2) == 0
    tiles.release(2)
    assert tiles.pool.free == 5
