"""Transition blocks: none is lost, none has two owners."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_hypic.pool.transition_blocks import NO_BLOCK, TransitionBlocks

CPU = torch.device("cpu")
HEADS, SLOTS = (3, 2), 4
BLOCKS = SLOTS * sum(HEADS)


class BlocksMachine(RuleBasedStateMachine):
    """Records are captured, any heads dead, captured again, loaded, and dropped, in two layers."""

    @initialize(joint=st.booleans())
    def make(self, joint: bool) -> None:
        self.blocks = TransitionBlocks(BLOCKS, 2, HEADS, SLOTS, torch.float16, CPU, joint=joint)
        self.alive: dict[int, int] = {}

    @rule(
        slot=st.integers(0, SLOTS - 1),
        dead=st.lists(st.booleans(), min_size=sum(HEADS), max_size=sum(HEADS)),
        loaded=st.booleans(),
    )
    def complete(self, slot: int, dead: list[bool], loaded: bool) -> None:
        self.blocks.offer(slot)
        parts = torch.tensor(dead).split(list(HEADS))
        assert all((table[slot] != NO_BLOCK).all() for table in self.blocks.block_of)
        self.alive[slot] = dead.count(False)
        if loaded:
            assert self.blocks.fill(slot, [(~part).numpy() for part in parts]) == self.alive[slot]
        else:
            for table, part in zip(self.blocks.block_of, parts, strict=True):
                table[slot][part] = NO_BLOCK
            assert self.blocks.settle(slot) == self.alive[slot]

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.blocks.release([slot])
        self.alive.pop(slot, None)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if not hasattr(self, "blocks"):
            return
        named = torch.cat([table.flatten() for table in self.blocks.block_of])
        named = named[named != NO_BLOCK]
        assert len(named.unique()) == len(named) == sum(self.alive.values())
        assert self.blocks.free == BLOCKS - len(named)
        assert not set(named.tolist()) & set(self.blocks._free)
        for slot in range(SLOTS):
            tables = [table[slot].tolist() for table in self.blocks.block_of]
            assert [row.tolist() for row in self.blocks.held(slot)] == tables


TestBlocksMachine = BlocksMachine.TestCase
TestBlocksMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_more_than_there_are_is_an_error() -> None:
    """Never two owners of one block."""
    blocks = TransitionBlocks(8, 2, HEADS, SLOTS, torch.float16, CPU)
    blocks.offer(0)
    with pytest.raises(RuntimeError, match="5 transition blocks wanted, 3 free"):
        blocks.offer(1)


def test_a_record_without_transitions_needs_none() -> None:
    blocks = TransitionBlocks(5, 2, HEADS, SLOTS, torch.float16, CPU)
    assert blocks.settle(2) == 0
    blocks.release([2])
    assert blocks.free == 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_linear_layers_needs_none(device: str) -> None:
    blocks = TransitionBlocks(0, 0, (), SLOTS, torch.float16, torch.device(device))
    blocks.offer(1)
    assert blocks.held(1) == [] and blocks.free == 0
    if device == "cpu":
        assert blocks.fill(1, []) == 0 and blocks.settle(1) == 0
    blocks.release([1])
