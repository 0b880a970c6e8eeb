"""Operators of decaying linear attention, in C++ and in PyTorch, against the float64 token loop, amid poison.

Tolerances are relative Frobenius errors: 2e-6 for what float32 holds, whatever the inputs are, as they are
exact; outputs in bfloat16: 4e-3; caches in bfloat16 and float16: half a step more; float64, in which PyTorch
computes where inputs are: 1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.decay_attention import Relocation, choose, native, reference
from vllm_hypic.backends.ops.decay_attention import torch as torch_ops
from vllm_hypic.backends.ops.program import Mode

from . import decaying
from .decay_inputs import POSITIONS, Layer, Shape
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
from .layer_inputs import PAD, SLOTS, Composed, Segment, compose_program

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}
OUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}

SIZES = [1, 2, 3, 40, 64, 129]
SHAPES = [
    Shape(4, 16, 32, rotated=8),
    Shape(1, 5, 7),
    Shape(3, 48, 16, rotated=48, neighbours=True),
    Shape(2, 128, 112, rotated=64),
    Shape(3, 20, 12, channel_gates=True),
    Shape(2, 32, 80, channel_gates=True),
]
SMALL, GATED = Shape(3, 32, 16, rotated=16), Shape(2, 16, 32, channel_gates=True)
EITHER = pytest.mark.parametrize("shape", [SMALL, GATED], ids=["constant", "channels"])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ALL: dict[str, Any] = {"c++": native, "torch": torch_ops}
MODULES = pytest.mark.parametrize("module", ALL.values(), ids=ALL)
LAWFUL = pytest.mark.parametrize("module", [reference, torch_ops], ids=["reference", "torch"])
"""Those that compute in float64 where inputs are."""


def served() -> pytest.MarkDecorator:
    """Modules with the shapes and dtypes that they serve."""
    cases = []
    for (name, module), shape, dtype in itertools.product(ALL.items(), SHAPES, DTYPES):
        if module is torch_ops or not (shape.K % 16 or shape.V % 16 or dtype == torch.float64):
            cases.append(pytest.param(module, shape, dtype, id=f"{name}-{shape}-{dtype}"))
    return pytest.mark.parametrize(("module", "shape", "dtype"), cases)


def check_segments(ours: Layer, exact: Layer, segments: Sequence[Segment]) -> None:
    dtype = ours.x.q.dtype
    step = CACHE_STEP[ours.caches.state.dtype]
    for s in segments:
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        assert relative(ours.out[rows], exact.out[rows]) < OUT_TOLERANCE[dtype], s
        assert relative(ours.state(s.batch_row), exact.state(s.batch_row)) < TOLERANCE[dtype] + step, s
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < TOLERANCE[dtype], s
        logs = [layer.records.log_transition[s.slot].double() for layer in (ours, exact)]
        torch.testing.assert_close(*logs, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
        assert s.leading == bool(logs[0].isinf().all())
    assert torch.equal(ours.out.isnan(), exact.out.isnan())
    others = [i for i in range(SLOTS) if i not in {s.slot for s in segments}]
    assert ours.records.state[others].isnan().all() and ours.records.log_transition[others].isnan().all()
    assert torch.equal(ours.caches.state.isnan(), exact.caches.state.isnan())


@served()
def test_segments(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """All sizes packed, amid poison; windows of 8, 3 and 0 tokens, one leading segment."""
    tokens, segments = packed(SIZES, SLOTS)
    layer = Layer.make(shape, tokens, dtype)
    exact = layer.exact()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments)
    check_segments(layer, exact, segments)


@MODULES
@pytest.mark.parametrize("cuts", [[1], [8], [9], [92], [99], [3, 8, 50, 51, 94]], ids=str)
@EITHER
def test_segments_in_several_passes(module: ModuleType, shape: Shape, cuts: list[int]) -> None:
    """Cuts before the interior, at its edges, inside, and behind it."""
    layer = Layer.make(shape, 150)
    segments = [
        Segment(0, 0, 100, 8, 92, 1),
        Segment(2, 100, 30, 0, 30, 3),
        Segment(1, 130, 20, 0, 20, 0, True),
    ]
    exact = layer.exact()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments, cuts)
    check_segments(layer, exact, segments)
    if cuts[-1] < 8:
        assert layer.carries[0].state.isnan().all(), "nothing to carry before the interior"


@MODULES
@pytest.mark.parametrize("g", [0.0, -1e-6, -30.0, -1e4])
@EITHER
def test_extreme_decays(module: ModuleType, shape: Shape, g: float) -> None:
    layer = Layer.make(shape, 80)
    layer = replace(layer, x=replace(layer.x, g=torch.full_like(layer.x.g, g)))
    segment, exact = Segment(0, 0, 80, 8, 72, 1), layer.exact()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    check_segments(layer, exact, [segment])


@MODULES
@EITHER
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_broken_inputs_stay_visible(module: ModuleType, shape: Shape, what: str) -> None:
    layer = Layer.make(shape, 60)
    getattr(layer.x, what)[PAD + 30] = float("nan")
    run_segments(module, layer, [Segment(0, 0, 60, 8, 52, 1)])
    assert layer.outputs(30, 31).isnan().all()
    if what != "q":
        assert layer.state(0).isnan().any() and layer.records.state[1].isnan().any()


# ----------------------------------------------------------------------------- composed requests


def check_composed(ours: Layer, exact: Layer, requests: Sequence[Composed]) -> None:
    dtype = ours.x.q.dtype
    decaying.check_composed(ours, exact, requests, TOLERANCE[dtype], OUT_TOLERANCE[dtype])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@served()
def test_compose(module: ModuleType, shape: Shape, dtype: torch.dtype, state: torch.dtype) -> None:
    layer, requests = every_kind_composed(lambda n: Layer.make(shape, n, dtype, state))
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)
    assert layer.state(3).isnan().all()


@MODULES
@EITHER
def test_islands_leave_every_bit_of_the_state(module: ModuleType, shape: Shape) -> None:
    """The state of the same walk without them."""
    shifts = [5, 0, 0], [0, 0, 0, 5, 0, 0]
    plain, ours, kept = walks_around_islands(module, Layer.make(shape, 103), shifts)
    assert torch.equal(ours.state(0), plain.state(0))
    assert relative(kept.state(0), plain.state(0)) > 100 * TOLERANCE[torch.float32]


@MODULES
@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(module: ModuleType, mode: Mode) -> None:
    layer = Layer.make(SMALL, 20)
    layer.random_record(0, 0)
    layer.records.log_transition[0] = torch.nan
    requests: list[Composed] = [(0, False, [(0, 9, 0, mode), (9, 11, -1, NONE)])]
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


@settings(max_examples=30, deadline=None)
@given(
    steps=steps_of(80),
    resumed=st.booleans(),
    shape=st.sampled_from([SMALL, GATED]),
    seed=st.integers(0, 1 << 16),
    module=st.sampled_from(list(ALL.values())),
)
def test_any_composition(
    steps: list[tuple[int, Mode, int]], resumed: bool, shape: Shape, seed: int, module: ModuleType
) -> None:
    """Operations of any kind in any order, beside another request."""
    tokens, requests = composition(steps, resumed)
    layer = Layer.make(shape, tokens, seed=seed)
    for slot in range(3):
        layer.random_record(slot, slot)
    layer.resume(1)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


# ----------------------------------------------------------------------------- laws


@LAWFUL
@EITHER
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 64, 2), (65, 1, 130)], ids=str)
def test_records_of_parts_make_that_of_the_whole(
    module: ModuleType, shape: Shape, lengths: tuple[int, ...]
) -> None:
    without = check_parts(module, lambda n: Layer.make(shape, n, torch.float64), lengths)
    assert without > 1e-3 or sum(lengths) > 100, "leaving T out must not go unnoticed"


@LAWFUL
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.integers(0, 5),
    start=st.integers(0, 900),
    seed=st.integers(0, 1 << 16),
)
def test_composition_is_one_scan(
    module: ModuleType, lengths: list[int], window: int, start: int, seed: int
) -> None:
    """Records of a text's pieces, each made at positions of its own and moved to where it stands, and the
    windows between them: outputs and state of one scan of the rotated text."""
    total = sum(n + window for n in lengths)
    raw = Layer.make(Shape(3, 16, 8, rotated=12), total, torch.float64, seed=seed)
    here, elsewhere = raw.rotated_from(start), raw.rotated_from(0)
    whole = here.copy()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        # Its rows at positions of the text's own from 0 on.
        run_segments(module, elsewhere, [Segment(1, at + window, n, 0, n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    ours = replace(here, records=elsewhere.records)
    run_compose(module, ours, [(0, False, operations)], [start] * len(operations))
    assert relative(ours.state(0), whole.state(0)) < 1e-12
    for first, count, _, _ in operations:
        if count:
            wanted = whole.outputs(first, first + count)
            assert relative(ours.outputs(first, first + count), wanted) < 1e-12


@pytest.mark.parametrize("neighbours", [False, True])
def test_relocation_is_rotation(neighbours: bool) -> None:
    """R(a) R(b) = R(a + b), R(0) is nothing, R(-a) R(a) too; each turns pairs and keeps their length."""
    layer = Layer.make(Shape(2, 16, 3, rotated=12, neighbours=neighbours), 1, torch.float64)
    layer.random_record(0, 0)
    S = layer.records.state[0]

    def moved(state: torch.Tensor, by: int) -> torch.Tensor:
        return Relocation(torch.tensor([by]), layer.table, neighbours).moved(state, 0)

    for a, b in ((3, 5), (1000, POSITIONS - 1001), (17, 0)):
        torch.testing.assert_close(moved(moved(S, a), b), moved(S, a + b), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moved(moved(S, a), -a), S, rtol=1e-12, atol=1e-12)
    assert moved(S, 0) is S and torch.equal(moved(S, 9)[:, 12:], S[:, 12:])
    torch.testing.assert_close(moved(S, 9).norm(), S.norm(), rtol=1e-12, atol=0)
    assert relative(moved(S, 9), S) > 0.1


@MODULES
def test_channels_that_decay_apart_cannot_be_relocated(module: ModuleType) -> None:
    layer = Layer.make(GATED, 4)
    rows, ops = compose_program([(0, False, [(0, 4, -1, NONE)])])
    relocation = Relocation(torch.zeros(1, dtype=torch.int64), layer.table)
    with pytest.raises(ValueError, match="one where channels decay apart"):
        module.decay_attention_compose(layer.x, layer.caches, layer.out, layer.records, rows, ops, relocation)


@MODULES
def test_what_decayed_in_a_long_segment(module: ModuleType) -> None:
    """32k tokens in passes of 1000: T is zero even in float64, the sum of log decays is exact."""
    tokens = 32_000
    layer = Layer.make(GATED, tokens)
    run_segments(module, layer, [Segment(0, 0, tokens, 2, tokens, 1)], list(range(1000, tokens, 1000)))
    exact = layer.x.g[PAD + 2 : PAD + tokens].double().sum(0)
    assert (exact < -1000).all() and (layer.transition(1) == 0).all()
    torch.testing.assert_close(layer.records.log_transition[1].double(), exact, rtol=1e-7, atol=0)
    assert layer.records.state[1].isfinite().all()


# ----------------------------------------------------------------------------- threads, choice, arguments


@EITHER
def test_threads_change_no_bit(shape: Shape) -> None:
    """More tasks than threads, several times: threads that shared scratch memory would be seen."""
    shape = replace(shape, heads=6)
    layers = [Layer.make(shape, 300) for _ in range(2)]
    segments = [Segment(i, 60 * i, 60, 8, 52, i) for i in range(5)]
    threads = torch.get_num_threads()
    try:
        for layer, count in zip(layers, (1, 4), strict=True):
            torch.set_num_threads(count)
            for _ in range(3):
                run_segments(native, layer, segments)
    finally:
        torch.set_num_threads(threads)
    one, several = layers
    assert torch.equal(one.outputs(0, 300), several.outputs(0, 300))
    assert torch.equal(one.records.state[:5], several.records.state[:5])


def test_choice() -> None:
    layer = Layer.make(SMALL, 1)
    assert choose(layer.x, layer.caches) is native
    exact = layer.exact()
    assert choose(layer.x, exact.caches) is torch_ops
    assert native.refuses(torch.float32, exact.caches.state) == "states in torch.float64"
    assert native.refuses(torch.float16, layer.caches.state) == "inputs in torch.float16"
    odd = Layer.make(Shape(1, 16, 7), 1)
    says = native.refuses(torch.float32, odd.caches.state)
    assert says == "head sizes 16 and 7, not multiples of 16"


def _strided_v(layer: Layer) -> None:
    layer.x = replace(layer.x, v=layer.x.v.mT.contiguous().mT)


BROKEN: dict[str, tuple[Callable[[Layer], None], str]] = {
    "v": (_strided_v, "v must be"),
    "g": (lambda layer: setattr(layer, "x", replace(layer.x, g=layer.x.g[:1])), "g is"),
    "out": (lambda layer: setattr(layer, "out", layer.out.bfloat16()), "out is"),
    "record": (lambda layer: setattr(layer.records, "state", layer.records.state[:, :1]), "record_state is"),
    "shift": (lambda layer: setattr(layer, "table", layer.table[:5]), "shift by -11 in a table of 5"),
    "table": (lambda layer: setattr(layer, "table", layer.table[:, :3].contiguous()), "table is"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_arguments_are_named(name: str) -> None:
    spoil, says = BROKEN[name]
    layer = Layer.make(SMALL, 8)
    layer.random_record(0, 0)
    spoil(layer)
    with pytest.raises((ValueError, TypeError, IndexError), match=says):
        run_compose(native, layer, [(0, False, [(0, 4, 0, TRANSITION), (4, 4, -1, NONE)])])
