"""Records of two stretches made one, against the whole recurrence in float64."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vllm_hypic.backends.linear.mamba1.cpu import HypicMamba1
from vllm_hypic.pool import tensors
from vllm_hypic.pool.appended import append
from vllm_hypic.pool.transition_blocks import NO_BLOCK, TransitionBlocks

SLOTS, HEADS, K, V, TOKENS = 4, 5, 6, 3, 12
OWN, BASE = 2, 1
DEAD = 2.0**-12
POISON = float("nan")


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recurrence(steps: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``S <- A S + U`` for each step from zero: the product of all A ``[..., K, K]``, and S, in float64."""
    transition = torch.eye(steps.size(-1), dtype=torch.float64).expand(steps[0].shape)
    state = torch.zeros_like(inputs[0])
    for step, given in zip(steps, inputs, strict=True):
        transition, state = step @ transition, step @ state + given
    return transition, state


def untouched(records: tensors.StateRecords, before: dict[str, torch.Tensor]) -> None:
    """Of tensors by slot no other has changed."""
    others = [s for s in range(SLOTS) if s != OWN]
    for name, old in before.items():
        now = getattr(records, name)
        if name != "transitions":
            torch.testing.assert_close(now[others], old[others], rtol=0, atol=0, equal_nan=True)


def copies(records: tensors.StateRecords) -> dict[str, torch.Tensor]:
    return {f.name: getattr(records, f.name).clone() for f in fields(records)}


class Matrices:
    """A layer's records in a pool whose unused blocks are poisoned, and what another record has."""

    def __init__(
        self, steps: torch.Tensor, inputs: torch.Tensor, cut: int, dead: dict[int, set[int]]
    ) -> None:
        """``dead``: heads, by slot, without a block."""
        cpu = torch.device("cpu")
        self.blocks = TransitionBlocks(4 * HEADS, K, [HEADS], SLOTS, torch.float16, cpu)
        self.blocks.storage.fill_(POISON)
        self.records = tensors.LinearRecords(
            torch.full((SLOTS, HEADS, K, V), POISON),
            torch.zeros(SLOTS, 3, 8),
            self.blocks.storage,
            self.blocks.block_of[0],
        )
        for slot, part in ((BASE, slice(None, cut)), (OWN, slice(cut, None)), (0, slice(None))):
            transition, state = recurrence(steps[part], inputs[part])
            self.blocks.offer(slot)
            rows = self.records.block_of[slot].long()
            self.records.transitions[rows] = transition.half()
            self.records.state[slot] = state.float()
            gone = sorted(dead.get(slot, ()))
            self.records.transitions[rows[gone]] = POISON
            self.records.block_of[slot, gone] = NO_BLOCK
            self.blocks.settle(slot) if slot != OWN else None


def steps_and_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    steps = 0.9 * torch.eye(K, dtype=torch.float64) + 0.1 * randn(TOKENS, HEADS, K, K, seed=1)
    return steps, randn(TOKENS, HEADS, K, V, seed=2)


EVERY_HEAD = set(range(HEADS))
DEAD_HEADS = {
    "all live": (set[int](), set[int]()),
    "some of the stretch": ({0, 3}, set[int]()),
    "some before": (set[int](), {1, 3}),
    "both": ({0, 3}, {3, 4}),
    "all of the stretch": (EVERY_HEAD, {2}),
    "all before": ({2}, EVERY_HEAD),
    "all": (EVERY_HEAD, EVERY_HEAD),
}


@pytest.mark.parametrize("case", DEAD_HEADS)
@pytest.mark.parametrize("cut", [1, 7, 11])
def test_matrices(case: str, cut: int) -> None:
    steps, inputs = steps_and_inputs()
    own, before = DEAD_HEADS[case]
    for head in own:  # forgets all in its stretch
        steps[cut, head] = 0.0
    for head in before:
        steps[0, head] = 0.0
    made = Matrices(steps, inputs, cut, {OWN: own, BASE: before})
    records, old = made.records, copies(made.records)
    others = torch.cat([records.block_of[s] for s in (0, BASE)])
    others = others[others != NO_BLOCK].long()
    append(records, OWN, BASE, DEAD)
    transition, state = recurrence(steps, inputs)
    torch.testing.assert_close(records.state[OWN].double(), state, rtol=0, atol=4e-3)
    torch.testing.assert_close(records.transition(OWN).double(), transition, rtol=0, atol=4e-3)
    untouched(records, old)
    torch.testing.assert_close(records.transitions[others], old["transitions"][others], rtol=0, atol=0)
    assert made.blocks.settle(OWN) == HEADS - len(own | before), "blocks of dead heads are given back"
    taken = sum(int((records.block_of[s] != NO_BLOCK).sum()) for s in range(SLOTS))
    assert made.blocks.free == 4 * HEADS - taken


def test_a_product_that_is_nearly_zero_is_dead() -> None:
    steps, inputs = steps_and_inputs()
    steps[0, 1] *= 2.0**-9
    steps[7, 1] *= 2.0**-9
    made = Matrices(steps, inputs, 6, {})
    append(made.records, OWN, BASE, DEAD)
    assert (made.records.block_of[OWN] == NO_BLOCK).tolist() == [False, True, False, False, False]


def test_the_order_matters() -> None:
    """The test of matrices sees a product the other way round."""
    steps, inputs = steps_and_inputs()
    made = Matrices(steps, inputs, 7, {})
    own, before = made.records.transition(OWN).double(), made.records.transition(BASE).double()
    transition, _ = recurrence(steps, inputs)
    assert (own @ before - transition).abs().max() < 4e-3 < 0.1 < (before @ own - transition).abs().max()


@pytest.mark.parametrize("shape", ["head", "channel", "convolution"])
@pytest.mark.parametrize("cut", [1, 7, 11])
def test_decays(shape: str, cut: int) -> None:
    """A number a head, of Mamba2 or retention, or a channel of K."""
    by_channel = shape == "channel"
    logs = -randn(TOKENS, HEADS, *[K] * by_channel, seed=3).abs() / 4
    decays = logs.exp() if by_channel else logs.exp()[..., None].expand(-1, -1, K)
    inputs = randn(TOKENS, HEADS, K, V, seed=4)
    state = torch.full((SLOTS, HEADS, K, V), POISON)
    log_transition = torch.full((SLOTS, HEADS, *[K] * by_channel), POISON)
    for slot, part in ((BASE, slice(None, cut)), (OWN, slice(cut, None))):
        state[slot] = recurrence(decays[part].diag_embed(), inputs[part])[1]
        log_transition[slot] = logs[part].sum(0)
    records: tensors.StateRecords = tensors.RetentionRecords(state, log_transition)
    if shape == "convolution":
        records = tensors.DecayRecords(state, randn(SLOTS, 3, 8, seed=5).float(), log_transition)
    old = copies(records)
    append(records, OWN, BASE, DEAD)
    wanted = recurrence(decays.diag_embed(), inputs)[1]
    torch.testing.assert_close(state[OWN].double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_transition[OWN].double(), logs.sum(0), rtol=1e-5, atol=1e-5)
    untouched(records, old)


@pytest.mark.parametrize("cut", [1, 7, 11])
def test_diagonals(cut: int) -> None:
    """Mamba1: the decay follows from the layer's A and the time that went by."""
    a = -randn(HEADS, K, seed=6).abs()
    elapsed = randn(TOKENS, HEADS, seed=7).abs() / 4
    decays = (a * elapsed[..., None]).exp()
    inputs = randn(TOKENS, HEADS, K, 1, seed=8)
    records = tensors.DiagonalRecords(
        torch.full((SLOTS, HEADS, K), POISON),
        torch.zeros(SLOTS, 3, HEADS),
        torch.full((SLOTS, HEADS), POISON),
    )
    for slot, part in ((BASE, slice(None, cut)), (OWN, slice(cut, None))):
        records.state[slot] = recurrence(decays[part].diag_embed(), inputs[part])[1][..., 0]
        records.elapsed[slot] = elapsed[part].sum(0)
    old = copies(records)
    HypicMamba1.append(cast(Any, SimpleNamespace(A=a.float())), records, OWN, BASE, DEAD)
    wanted = recurrence(decays.diag_embed(), inputs)[1][..., 0]
    torch.testing.assert_close(records.state[OWN].double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(records.elapsed[OWN].double(), elapsed.sum(0), rtol=1e-5, atol=1e-5)
    untouched(records, old)
    with pytest.raises(TypeError, match="no transition"):
        append(records, OWN, BASE, DEAD)


def test_a_convolution_alone_has_the_last_inputs() -> None:
    records = tensors.ConvRecords(randn(SLOTS, 3, 8, seed=9))
    old = records.conv_tail.clone()
    append(records, OWN, BASE, DEAD)
    assert torch.equal(records.conv_tail, old)
