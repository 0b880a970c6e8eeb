"""Mamba1's layer operators, in C++ and in PyTorch, against the float64 token loop, amid poison.

Tolerances are relative Frobenius errors: 1e-6 for what float32 holds, whatever the inputs are, as they are
exact; outputs in bfloat16: 4e-3; caches in bfloat16 and float16: half a step more; float64, in which PyTorch
computes where inputs are: 1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.mamba1 import choose, native, reference
from vllm_hypic.backends.ops.mamba1 import torch as torch_ops
from vllm_hypic.backends.ops.program import Mode

from . import decaying
from .decaying import (
    ADD,
    CACHE_STEP,
    NONE,
    REPLACE,
    TRANSITION,
    check_parts,
    composition,
    every_kind_composed,
    packed,
    run_compose,
    run_segments,
    steps_of,
    walks_around_islands,
)
from .inputs import relative
from .layer_inputs import PAD, SLOTS, Composed, Segment
from .mamba1_inputs import Layer, Shape

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
OUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}

SIZES = [1, 2, 3, 40, 64, 129]
SHAPES = [Shape(16, 16), Shape(48, 8), Shape(5, 7), Shape(32, 20)]
SMALL = Shape(32, 16)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ALL: dict[str, Any] = {"c++": native, "torch": torch_ops}
MODULES = pytest.mark.parametrize("module", ALL.values(), ids=ALL)
LAWFUL = pytest.mark.parametrize("module", [reference, torch_ops], ids=["reference", "torch"])
"""Those that compute in float64 where inputs are."""


def served(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Modules with the shapes and dtypes that they serve."""
    cases = []
    for (name, module), shape, dtype in itertools.product(ALL.items(), shapes, dtypes):
        if module is torch_ops or not (shape.channels % 16 or shape.N % 4 or dtype == torch.float64):
            cases.append(pytest.param(module, shape, dtype, id=f"{name}-{shape}-{dtype}"))
    return pytest.mark.parametrize(("module", "shape", "dtype"), cases)


def check_segments(ours: Layer, exact: Layer, segments: Sequence[Segment]) -> None:
    dtype = ours.x.x.dtype
    step = CACHE_STEP[ours.caches.state.dtype]
    for s in segments:
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        assert relative(ours.out[rows], exact.out[rows]) < OUT_TOLERANCE[dtype], s
        assert relative(ours.state(s.batch_row), exact.state(s.batch_row)) < TOLERANCE[dtype] + step, s
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < TOLERANCE[dtype], s
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        elapsed, wanted = (layer.records.elapsed[s.slot].double() for layer in (ours, exact))
        torch.testing.assert_close(elapsed, wanted, rtol=tolerance, atol=0)
        assert s.leading == bool(elapsed.isinf().all())
    assert torch.equal(ours.out.isnan(), exact.out.isnan())
    others = [i for i in range(SLOTS) if i not in {s.slot for s in segments}]
    assert ours.records.state[others].isnan().all() and ours.records.elapsed[others].isnan().all()
    assert torch.equal(ours.caches.state.isnan(), exact.caches.state.isnan())


@served(SHAPES, DTYPES)
def test_segments(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """All sizes packed, amid poison; windows of 8, 3 and 0 tokens, one leading segment."""
    tokens, segments = packed(SIZES, SLOTS)
    layer = Layer.make(shape, tokens, dtype)
    exact = layer.exact()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments)
    check_segments(layer, exact, segments)


CUTS = [[1], [8], [9], [92], [99], [3, 8, 50, 51, 94]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@MODULES
def test_segments_in_several_passes(module: ModuleType, cuts: list[int]) -> None:
    """Cuts before the interior, at its edges, inside, and behind it; no bit of C++ depends on them."""
    layer = Layer.make(SMALL, 150)
    segments = [
        Segment(0, 0, 100, 8, 92, 1),
        Segment(2, 100, 30, 0, 30, 3),
        Segment(1, 130, 20, 0, 20, 0, True),
    ]
    exact, whole = layer.exact(), layer.copy()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments, cuts)
    check_segments(layer, exact, segments)
    run_segments(module, whole, segments)
    if module is native:
        assert torch.equal(layer.records.state[[0, 1, 3]], whole.records.state[[0, 1, 3]])
        assert torch.equal(layer.outputs(0, 150), whole.outputs(0, 150))
    if cuts[-1] < 8:
        assert layer.carries[0].state.isnan().all(), "nothing to carry before the interior"


@MODULES
@pytest.mark.parametrize("what", ["x", "dt", "gate", "B", "C"])
def test_broken_inputs_stay_visible(module: ModuleType, what: str) -> None:
    """From the broken token on everything is NaN; before it nothing changes."""
    worlds = [Layer.make(SMALL, 60) for _ in range(2)]
    getattr(worlds[1].x, what)[PAD + 30] = float("nan")
    for layer in worlds:
        run_segments(module, layer, [Segment(0, 0, 60, 8, 52, 1)])
    right, wrong = worlds
    assert wrong.outputs(30, 31).isnan().all()
    if what in ("x", "dt", "B"):  # the others are read by their own row alone
        assert wrong.outputs(30, 60).isnan().all() and wrong.state(0).isnan().all()
        assert wrong.records.state[1].isnan().all()
    assert torch.equal(wrong.outputs(0, 30), right.outputs(0, 30))


@MODULES
@pytest.mark.parametrize("dt", [-30.0, -9.0, 0.0, 20.0, 1000.0])
def test_extreme_steps(module: ModuleType, dt: float) -> None:
    layer = Layer.make(SMALL, 80).with_steps(dt)
    segment = Segment(0, 0, 80, 8, 72, 1)
    exact = layer.exact()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    check_segments(layer, exact, [segment])


# ----------------------------------------------------------------------------- composed requests


def check_composed(ours: Layer, exact: Layer, requests: Sequence[Composed]) -> None:
    dtype = ours.x.x.dtype
    decaying.check_composed(ours, exact, requests, TOLERANCE[dtype], OUT_TOLERANCE[dtype])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@served(SHAPES, DTYPES)
def test_compose(module: ModuleType, shape: Shape, dtype: torch.dtype, state: torch.dtype) -> None:
    layer, requests = every_kind_composed(lambda n: Layer.make(shape, n, dtype, state))
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)
    assert layer.state(3).isnan().all()


@MODULES
def test_islands_leave_every_bit_of_the_state(module: ModuleType) -> None:
    """The state of the same walk without them."""
    plain, ours, kept = walks_around_islands(module, Layer.make(SMALL, 103))
    assert torch.equal(ours.state(0), plain.state(0))
    assert relative(kept.state(0), plain.state(0)) > 100 * TOLERANCE[torch.float32]


@MODULES
@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(module: ModuleType, mode: Mode) -> None:
    layer = Layer.make(SMALL, 20)
    layer.random_record(0, 0)
    layer.records.elapsed[0] = torch.nan
    requests: list[Composed] = [(0, False, [(0, 9, 0, mode), (9, 11, -1, NONE)])]
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


@settings(max_examples=25, deadline=None)
@given(
    steps=steps_of(40),
    resumed=st.booleans(),
    seed=st.integers(0, 1 << 16),
    module=st.sampled_from(list(ALL.values())),
)
def test_any_composition(
    steps: list[tuple[int, Mode, int]], resumed: bool, seed: int, module: ModuleType
) -> None:
    """Operations of any kind in any order, beside another request."""
    tokens, requests = composition(steps, resumed)
    layer = Layer.make(SMALL, tokens, seed=seed)
    for slot in range(3):
        layer.random_record(slot, slot)
    layer.resume(1)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


# ----------------------------------------------------------------------------- laws


@LAWFUL
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 64, 2), (65, 1, 130)], ids=str)
def test_records_of_parts_make_that_of_the_whole(module: ModuleType, lengths: tuple[int, ...]) -> None:
    without = check_parts(module, lambda n: Layer.make(Shape(8, 12), n, torch.float64), lengths)
    assert without > 1e-3, "leaving T out must not go unnoticed"


@LAWFUL
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.integers(0, 5),
    seed=st.integers(0, 1 << 16),
)
def test_composition_is_one_scan(module: ModuleType, lengths: list[int], window: int, seed: int) -> None:
    """Records of a text's pieces, and the windows between them: outputs and state of one scan."""
    total = sum(n + window for n in lengths)
    layer = Layer.make(Shape(8, 8), total, torch.float64, seed=seed)
    whole = layer.copy()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        run_segments(module, layer, [Segment(1, 0, at + window + n, at + window, at + window + n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    layer.out.fill_(torch.nan)
    run_compose(module, layer, [(0, False, operations)])
    assert relative(layer.state(0), whole.state(0)) < 1e-12
    for first, count, _, _ in operations:
        if count:
            wanted = whole.outputs(first, first + count)
            assert relative(layer.outputs(first, first + count), wanted) < 1e-12


@MODULES
def test_what_elapsed_in_a_long_segment(module: ModuleType) -> None:
    """32k tokens in passes of 1000: T is zero even in float64, the sum of the steps is exact."""
    tokens = 32_000
    layer = Layer.make(Shape(16, 4), tokens).with_steps(-1.5)
    layer.x.dt.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    run_segments(module, layer, [Segment(0, 0, tokens, 2, tokens, 1)], list(range(1000, tokens, 1000)))
    d = F.softplus(layer.x.dt[PAD + 2 : PAD + tokens].double() + layer.weights.dt_bias)
    exact = d.sum(0)
    assert (exact > 1000).all() and (layer.transition(1) == 0).all()
    torch.testing.assert_close(layer.records.elapsed[1].double(), exact, rtol=1e-7, atol=0)
    # What a sum in float32 would leave of it.
    single = torch.zeros(16)
    for step in d.float():
        single += step
    assert relative(single, exact) > 1e-7
    assert layer.records.state[1].isfinite().all()


# ----------------------------------------------------------------------------- others' code, arguments


def test_the_reference_is_the_published_recurrence() -> None:
    """Against transformers' Mamba layer, in float32."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = MambaConfig(hidden_size=8, state_size=4, intermediate_size=16, time_step_rank=3)
    mixer = MambaMixer(config, layer_idx=0)
    hidden = torch.randn(30, 8)
    with torch.no_grad():
        mixer.x_proj.weight.normal_()
        mixer.D.normal_()
        theirs = mixer(hidden[None])[0]
        value, gate = mixer.in_proj(hidden).chunk(2, -1)
        padded = F.conv1d(value.T[None], mixer.conv1d.weight, mixer.conv1d.bias, padding=3, groups=16)
        x = F.silu(padded[0, :, :30].T)
        dt, B, C = mixer.x_proj(x).split([3, 4, 4], -1)
        d = F.softplus(mixer.dt_proj(dt))
        double = (t.double() for t in (x, d, -mixer.A_log.exp(), B, C, torch.zeros(16, 4)))
        y, _ = reference.scan(*double)
        ours = mixer.out_proj(((y + mixer.D * x) * F.silu(gate)).float())
    assert relative(ours, theirs) < 1e-6


def test_threads_change_no_bit() -> None:
    """More tasks than threads, several times: threads that shared scratch memory would be seen."""
    threads, worlds = torch.get_num_threads(), []
    try:
        for count in (1, 4, 4, 16):
            torch.set_num_threads(count)
            layer = Layer.make(Shape(128, 16), 200, torch.bfloat16)
            run_segments(native, layer, [Segment(i, 100 * i, 100, 8, 92, i) for i in range(2)], [40])
            run_compose(native, layer, [(3, False, [(0, 100, 0, TRANSITION), (100, 100, 1, TRANSITION)])])
            worlds.append(layer)
    finally:
        torch.set_num_threads(threads)
    one = worlds[0]
    for other in worlds[1:]:
        assert torch.equal(one.outputs(0, 200), other.outputs(0, 200))
        assert all(torch.equal(one.state(row), other.state(row)) for row in (0, 1, 3))
        assert torch.equal(one.records.state[:2], other.records.state[:2])
        assert torch.equal(one.records.elapsed[:2], other.records.elapsed[:2])


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(SMALL, 20)
    good = Segment(0, 0, 20, 0, 20, 1)
    for bad, message in {
        replace(good, tokens=40, hi=20): "rows",
        replace(good, batch_row=SLOTS): "batch row",
        replace(good, slot=SLOTS): "record",
    }.items():
        with pytest.raises(IndexError, match=message):
            run_segments(native, layer, [bad])
    with pytest.raises(IndexError, match="record"):
        run_compose(native, layer, [(0, False, [(0, 1, SLOTS, TRANSITION)])])
    with pytest.raises(IndexError, match="carries number"):
        run_segments(native, replace(layer, carries=[]), [good], [10])
    assert layer.out.isnan().all()


def test_what_the_kernels_refuse_is_served_in_pytorch() -> None:
    for state in (torch.float32, torch.bfloat16, torch.float16):
        layer = Layer.make(SMALL, 4, state=state)
        assert choose(layer.x, layer.caches) is native
    odd = Layer.make(Shape(24, 16), 4)
    assert "24 channels with states of 16, not multiples" in str(
        native.refuses(torch.float32, odd.caches.state)
    )
    assert choose(odd.x, odd.caches) is torch_ops
    assert "inputs in torch.float16" in str(native.refuses(torch.float16, layer.caches.state))
    assert "states in torch.float64" in str(native.refuses(torch.float32, layer.caches.state.double()))
