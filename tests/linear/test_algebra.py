"""Laws of the algebra: monoid of summaries, dtypes, relocation of scalar states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.linear.algebra import (
    DenseTransition,
    DiagonalTransition,
    ScalarTransition,
    Summary,
    Transition,
    apply,
    compose,
    compose_all,
    identity,
    relocate,
)

from .inputs import relative

LEAD = (2, 3)  # batch, heads
K, V = 6, 5
KINDS = ("scalar", "diagonal", "per-entry", "dense")


def random_transition(kind: str, seed: int) -> Transition:
    gen = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=gen, dtype=torch.float64)

    if kind == "scalar":
        return ScalarTransition(-uniform(*LEAD))
    if kind == "diagonal":
        return DiagonalTransition(-uniform(*LEAD, K))
    if kind == "per-entry":
        return DiagonalTransition(-uniform(*LEAD, K, V))
    return DenseTransition((uniform(*LEAD, K, K) - 0.5) / math.sqrt(K))


def random_state(seed: int) -> torch.Tensor:
    return torch.randn(*LEAD, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_summaries_form_a_monoid_acting_on_states(kind: str, seed: int) -> None:
    a, b, c = (Summary(random_transition(kind, seed + i), random_state(seed + 10 + i)) for i in range(3))
    before = random_state(seed + 20)
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert relative(left.transition.tensor, right.transition.tensor) < 1e-14
    assert relative(left.state, right.state) < 1e-14
    assert relative(left.after(before), compose_all([a, b, c], before)) < 1e-14

    neutral = a.identity()
    for same in (a.then(neutral), neutral.then(a)):
        assert torch.equal(same.transition.tensor, a.transition.tensor)
        assert torch.equal(same.state, a.state)
    assert torch.equal(neutral.after(before), before)


@pytest.mark.parametrize("kind", KINDS)
def test_composition_is_application_in_a_row(kind: str) -> None:
    early, late, state = random_transition(kind, 1), random_transition(kind, 2), random_state(3)
    assert relative(apply(compose(late, early), state), apply(late, apply(early, state))) < 1e-14
    assert torch.equal(apply(identity(early), state), state)
    assert type(compose(late, early)) is type(early)


def test_dense_order_matters_and_is_later_times_earlier() -> None:
    early, late = random_transition("dense", 1), random_transition("dense", 2)
    assert torch.equal(compose(late, early).tensor, late.tensor @ early.tensor)


def test_underflowing_decays_keep_their_logarithm() -> None:
    half = ScalarTransition(torch.full(LEAD, -80.0))
    long = compose(half, compose(half, half))
    assert torch.equal(long.tensor, torch.full(LEAD, -240.0))
    assert torch.equal(long.apply(random_state(0).float()), torch.zeros(*LEAD, K, V))
    gone = ScalarTransition(torch.full(LEAD, -math.inf))
    assert compose(gone, half).apply(random_state(0)).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_widened_before_arithmetic(dtype: torch.dtype) -> None:
    exact = random_transition("dense", 4)
    assert isinstance(exact, DenseTransition)
    T, S = exact.rounded(dtype), random_state(5)
    assert T.apply(S.to(dtype)).dtype == torch.float32
    assert T.apply(S).dtype == torch.float64
    assert T.compose(T).tensor.dtype == torch.float32
    assert torch.equal(T.apply(S.float()), T.tensor.float() @ S.float())
    assert T.identity().tensor.dtype == dtype


def test_nbytes_are_those_of_the_record() -> None:
    S = torch.zeros(*LEAD, K, V)
    assert ScalarTransition(torch.zeros(LEAD)).nbytes == 6 * 4
    assert DiagonalTransition(torch.zeros(*LEAD, K)).nbytes == 6 * K * 4
    T = DenseTransition(torch.zeros(*LEAD, K, K, dtype=torch.float16))
    assert T.nbytes == 6 * K * K * 2
    assert Summary(T, S).nbytes == T.nbytes + S.nbytes


def test_what_does_not_fit_is_refused() -> None:
    dense, scalar, state = random_transition("dense", 0), random_transition("scalar", 0), random_state(0)
    with pytest.raises(TypeError, match="cannot compose"):
        compose(dense, scalar)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="cannot compose"):
        compose(scalar, ScalarTransition(torch.zeros(5)))
    with pytest.raises(ValueError, match="does not fit"):
        dense.apply(state[..., :4, :])
    with pytest.raises(ValueError, match="leading part"):
        scalar.apply(state[:1])
    with pytest.raises(TypeError, match="float32"):
        ScalarTransition(torch.zeros(LEAD, dtype=torch.float16))
    with pytest.raises(TypeError, match="square"):
        DenseTransition(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="rotary frequencies"):
        relocate(state, 1, torch.ones(4))


INV_FREQ = 10000.0 ** -(torch.arange(2, dtype=torch.float64) / 2)


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=20, deadline=None)
@given(a=st.integers(-1000, 1000), b=st.integers(-1000, 1000))
def test_relocations_add_up(interleaved: bool, a: int, b: int) -> None:
    state = random_state(7)

    def move(x: torch.Tensor, by: int) -> torch.Tensor:
        return relocate(x, by, INV_FREQ, interleaved=interleaved)

    assert relative(move(move(state, a), b), move(state, a + b)) < 1e-12
    assert relative(move(move(state, a), -a), state) < 1e-12
    assert torch.equal(move(state, 0), state)
    assert torch.equal(move(state, a)[..., 4:, :], state[..., 4:, :])


def test_relocation_takes_an_offset_per_batch_entry_and_keeps_the_dtype() -> None:
    state = random_state(8)
    moved = relocate(state, torch.tensor([3, 11]), INV_FREQ)
    for i, offset in enumerate((3, 11)):
        assert torch.equal(moved[i], relocate(state[i], offset, INV_FREQ))
    per_head = relocate(state, torch.tensor([[1, 2, 3], [4, 5, 6]]), INV_FREQ)
    assert torch.equal(per_head[1, 2], relocate(state[1, 2], 6, INV_FREQ))
    low = relocate(state.bfloat16(), 3, INV_FREQ)
    assert low.dtype == torch.bfloat16
    assert relative(low, relocate(state, 3, INV_FREQ)) < 1e-2
