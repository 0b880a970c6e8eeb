"""For every family: composing summaries of pieces equals one scan, in float64; without T it does not."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.linear import references as ref
from vllm_hypic.backends.linear.algebra import Summary, Transition, compose_all, relocate

from .inputs import ROTARY, family_inputs, relative

FAMILIES = sorted(ref.FAMILIES)
LENGTHS = st.sampled_from([1, 2, 7, 63, 64, 65])


def pieces(inputs: ref.Family, lengths: list[int]) -> list[Summary[Transition]]:
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return [ref.summary(inputs[a:b]) for a, b in pairwise(bounds)]


def random_start(inputs: ref.Family) -> torch.Tensor:
    zero = inputs.zero_state()
    return torch.randn(zero.shape, generator=torch.Generator().manual_seed(99), dtype=zero.dtype)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(LENGTHS, min_size=2, max_size=3), seed=st.integers(0, 1000))
@example(lengths=[1, 63, 64, 65], seed=0)
def test_composed_state_is_one_scan(name: str, lengths: list[int], seed: int) -> None:
    inputs = family_inputs(name, sum(lengths), seed)
    start = random_start(inputs)
    parts = pieces(inputs, lengths)
    exact = ref.recurrence(inputs, start)[1]
    error = relative(compose_all(parts, start), exact)
    assert error < 1e-12

    together = parts[0]
    for part in parts[1:]:
        together = together.then(part)
    assert relative(together.after(start), exact) < 1e-12

    naive = start + torch.stack([part.state for part in parts]).sum(0)
    assert relative(naive, exact) > 1e6 * max(error, 1e-14), "leaving T out must not go unnoticed"


@pytest.mark.parametrize("name", FAMILIES)
def test_one_token_acts_as_its_transition_says(name: str) -> None:
    """The recurrence is written without T, so this ties the two together."""
    inputs = family_inputs(name, 3)
    start = random_start(inputs)
    for t in range(3):
        _, after = inputs.step(t, start)
        _, write = inputs.step(t, inputs.zero_state())
        assert relative(inputs.transition(t).apply(start) + write, after) < 1e-14


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_of_pieces_are_those_of_one_scan(name: str) -> None:
    inputs = family_inputs(name, 70)
    whole, _ = ref.recurrence(inputs)
    before = ref.summary(inputs[:63]).state
    rest, _ = ref.recurrence(inputs[63:], before)
    assert relative(rest, whole[63:]) < 1e-12


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3), lead=st.integers(0, 500))
def test_relocated_pieces_compose_to_one_scan(interleaved: bool, lengths: list[int], lead: int) -> None:
    """Segments prefilled at position 0 stand anywhere once their states are rotated."""
    inputs = family_inputs("lightning2-rotary", sum(lengths), 3)
    assert isinstance(inputs, ref.Lightning2)
    rotary = ref.Rotary(ROTARY.inv_freq, interleaved)
    inputs = ref.Lightning2(inputs.q, inputs.k, inputs.v, inputs.log_decay, rotary, start=lead)
    start = random_start(inputs)
    exact = ref.recurrence(inputs, start)[1]

    state, done, unmoved = start, 0, start
    for n in lengths:
        alone = ref.summary(inputs[done : done + n].at(0))
        moved = relocate(alone.state, lead + done, rotary.inv_freq, interleaved=interleaved)
        state = Summary(alone.transition, moved).after(state)
        unmoved = alone.after(unmoved)
        done += n
    assert relative(state, exact) < 1e-12
    if lead + sum(lengths[:-1]):
        assert relative(unmoved, exact) > 1e-4, "leaving the rotation out must not go unnoticed"


def test_decays_are_the_published_ones() -> None:
    assert torch.allclose(ref.RetNet.decays(2).exp(), torch.tensor([31 / 32, 63 / 64], dtype=torch.float64))
    slopes = -ref.Lightning2.decays(8, 0, 8)
    assert torch.allclose(slopes[:2], torch.tensor([0.5, 0.25], dtype=torch.float64), rtol=2e-5)
    assert ref.Lightning2.decays(8, 7, 8).abs().max() < 1e-5


@pytest.mark.parametrize(
    "module",
    ["backends.linear.algebra", "backends.linear.references", "backends.ops.gated_delta"],
)
def test_imports_no_vllm(module: str) -> None:
    code = f"import sys, vllm_hypic.{module}; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
