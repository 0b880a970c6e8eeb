"""Mamba2's layer operators, in C++ and in PyTorch, against the float64 token loop, amid poison.

Tolerances are relative Frobenius errors. float32 inputs: 1e-6. bfloat16 inputs are exact too, but their
convolution's results are rounded to bfloat16, and where float32 and float64 stand on two sides of a rounding
edge an element differs by 2^-8: 1e-4 for states (a handful of such elements), 4e-3 for outputs, which are
bfloat16. Inputs in float64, for which PyTorch computes all in float64: 1e-12. Caches in bfloat16 and float16:
half a step more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.mamba2 import native, reference
from vllm_hypic.backends.ops.mamba2 import torch as torch_ops
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
    packed,
    run_compose,
    run_segments,
    scanned,
    steps_of,
    walks_around_islands,
)
from .inputs import relative
from .layer_inputs import PAD, SLOTS, Composed, Segment
from .mamba2_inputs import Layer, Shape, every_kind_composed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-4}
OUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}

CHUNK = 64
SIZES = [1, 2, 3, 63, 64, 65, 129, 300]
SHAPES = [
    Shape(1, 1, 16, 16),
    Shape(4, 2, 24, 20, bias=False),
    Shape(6, 1, 5, 7, taps=2),
    Shape(2, 2, 16, 48, taps=3),
    Shape(6, 3, 80, 16, taps=2, bias=False),
    Shape(8, 2, 64, 128),
]
SMALL = Shape(4, 2, 16, 32)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ALL = {"c++": native, "torch": torch_ops}
MODULES = pytest.mark.parametrize("module", ALL.values(), ids=ALL)


def served(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Modules with the shapes and dtypes that they serve."""
    cases = []
    for (name, module), shape, dtype in itertools.product(ALL.items(), shapes, dtypes):
        if module is torch_ops or not (shape.P % 16 or shape.N % 16 or dtype == torch.float64):
            cases.append(pytest.param(module, shape, dtype, id=f"{name}-{shape}-{dtype}"))
    return pytest.mark.parametrize(("module", "shape", "dtype"), cases)


LAWFUL = pytest.mark.parametrize("module", [reference, torch_ops], ids=["reference", "torch"])
"""Those that compute in float64 where inputs are."""


def check_segments(ours: Layer, exact: Layer, segments: Sequence[Segment], before: Layer) -> None:
    dtype = ours.x.mixed.dtype
    step = CACHE_STEP[ours.caches.state.dtype]
    for s in segments:
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        assert relative(ours.out[rows], exact.out[rows]) < OUT_TOLERANCE[dtype], s
        assert relative(ours.state(s.batch_row), exact.state(s.batch_row)) < TOLERANCE[dtype] + step, s
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < TOLERANCE[dtype], s
        check_log(ours.records.log_transition[s.slot], exact.records.log_transition[s.slot], dtype)
        assert s.leading == bool(ours.records.log_transition[s.slot].isinf().all())
        assert torch.equal(ours.records.conv_tail[s.slot], exact.records.conv_tail[s.slot])
        assert torch.equal(ours.context(s.batch_row), exact.context(s.batch_row))
    written = ~exact.out.isnan().flatten(1).any(1)
    assert ours.out[~written].isnan().all()
    others = [i for i in range(SLOTS) if i not in {s.slot for s in segments}]
    for name in ("state", "conv_tail", "log_transition"):
        assert getattr(ours.records, name)[others].isnan().all()
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[[int(ours.caches.slots[s.batch_row]) for s in segments]] = False
    assert ours.caches.state[untouched].isnan().all() and before.caches.state[untouched].isnan().all()


def check_log(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """log T: finite, of relative precision, which is an absolute one of T."""
    tolerance = 1e-12 if dtype == torch.float64 else 5e-7
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=0)


@served(SHAPES, DTYPES)
def test_segments(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """All sizes packed in two calls, amid poison; windows of 8, 3 and 0 tokens, one leading segment."""
    for sizes in (SIZES[:4], SIZES[4:]):
        tokens, segments = packed(sizes, SLOTS)
        layer = Layer.make(shape, tokens, dtype)
        exact, before = layer.exact(), layer.copy()
        run_segments(reference, exact, segments)
        run_segments(module, layer, segments)
        check_segments(layer, exact, segments, before)


CUTS = [[1], [5], [8], [9], [40], [64], [192], [199], [3, 8, 50, 51, 194], [7, 9]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@served([SMALL], [torch.float64, torch.float32])
def test_segments_in_several_passes(
    module: ModuleType, shape: Shape, dtype: torch.dtype, cuts: list[int]
) -> None:
    """Cuts inside the window before the interior, at its edges, inside, and behind it."""
    layer = Layer.make(shape, 250, dtype)
    segments = [
        Segment(0, 0, 200, 8, 192, 1),
        Segment(2, 200, 30, 0, 30, 3),
        Segment(1, 230, 20, 0, 20, 0, True),
    ]
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments, cuts)
    check_segments(layer, exact, segments, before)
    if cuts[-1] < 8:
        assert layer.carries[0].state.isnan().all(), "nothing to carry before the interior"


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 150),
    window=st.integers(0, 9),
    tail=st.booleans(),
    cuts=st.sets(st.integers(1, 149), max_size=5),
    seed=st.integers(0, 1 << 16),
    module=st.sampled_from(list(ALL.values())),
)
def test_any_segment_in_any_passes(
    tokens: int, window: int, tail: bool, cuts: set[int], seed: int, module: ModuleType
) -> None:
    lo = min(window, tokens - 1)
    hi = max(lo + 1, tokens - window) if tail else tokens
    segment = Segment(0, 0, tokens, lo, hi, 2)
    layer = Layer.make(Shape(2, 1, 16, 16, taps=3), tokens, seed=seed)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment], sorted(c for c in cuts if c < tokens))
    check_segments(layer, exact, [segment], before)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
@MODULES
def test_caches_of_half_the_bits(module: ModuleType, state: torch.dtype) -> None:
    """States are rounded where a pass ends, as stock code rounds them; records hold nothing of that."""
    segment, cuts = Segment(0, 0, 200, 8, 192, 1), [64, 100]
    layer = Layer.make(SMALL, 200, state=state)
    rounded, whole = layer.copy(), layer.exact()
    run_segments(reference, whole, [segment])
    run_segments(reference, rounded, [segment], cuts)
    run_segments(module, layer, [segment], cuts)
    assert layer.state(0).dtype == state
    # An element at a rounding edge falls to either side.
    assert relative(layer.state(0), rounded.state(0)) < 0.05 * CACHE_STEP[state]
    assert relative(layer.state(0), whole.state(0)) < CACHE_STEP[state]
    assert relative(layer.outputs(0, 200), rounded.outputs(0, 200)) < 0.05 * CACHE_STEP[state]
    assert relative(layer.records.state[1], whole.records.state[1]) < TOLERANCE[torch.float32]
    # What the difference of states would give.
    T, meets = whole.transition(1), scanned(reference, layer.exact(), 1, 0, 8)
    difference = scanned(reference, layer.copy(), 1, 0, 192).double() - T * meets
    assert relative(difference, whole.records.state[1]) > 100 * TOLERANCE[torch.float32]


@MODULES
@pytest.mark.parametrize("what", ["mixed", "dt"])
def test_what_is_no_number_is_not_passed_over(module: ModuleType, what: str) -> None:
    """From the broken token on everything is NaN; before it nothing changes."""
    worlds = [Layer.make(SMALL, 200) for _ in range(2)]
    getattr(worlds[1].x, what)[PAD + 150] = float("nan")
    for layer in worlds:
        run_segments(module, layer, [Segment(0, 0, 200, 8, 192, 1)])
    right, wrong = worlds
    assert wrong.outputs(150, 200).isnan().all() and wrong.state(0).isnan().all()
    assert wrong.records.state[1].isnan().all()
    assert torch.equal(wrong.outputs(0, 128), right.outputs(0, 128)), "chunks before the broken one"


@MODULES
@pytest.mark.parametrize("g", [-3000.0, -100.0, -0.5, -1e-4, -1e-7])
def test_extreme_gates(module: ModuleType, g: float) -> None:
    layer = Layer.make(SMALL, 200).with_decay(g)
    segment = Segment(0, 0, 200, 8, 192, 1)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    check_segments(layer, exact, [segment], before)


@MODULES
def test_a_record_beside_a_large_state(module: ModuleType) -> None:
    """T near 1 and a state a million times what the interior adds: the record does not feel it."""
    layer = Layer.make(SMALL, 100).with_decay(-1e-5)
    layer.x.mixed[PAD + 8 - 4 : PAD + 8] *= 1e6
    exact = layer.exact()
    # The convolution's reach is in the window, so that the interior's own inputs are ordinary.
    segment = Segment(0, 0, 100, 12, 100, 1)
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    record, wanted = layer.records.state[1], exact.records.state[1]
    assert layer.state(0).norm() > 1e6 * record.norm()
    assert relative(record, wanted) < TOLERANCE[torch.float32]
    difference = layer.state(0) - layer.transition(1) * scanned(module, layer.copy(), 1, 0, 12)
    assert relative(difference, wanted) > 1e-3


# ----------------------------------------------------------------------------- composed requests


def check_composed(ours: Layer, exact: Layer, requests: Sequence[Composed]) -> None:
    dtype = ours.x.mixed.dtype
    decaying.check_composed(ours, exact, requests, TOLERANCE[dtype], OUT_TOLERANCE[dtype])
    assert all(torch.equal(ours.context(row), exact.context(row)) for row, _, _ in requests)


@served(SHAPES, DTYPES)
def test_compose(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    layer, requests = every_kind_composed(shape, dtype, torch.float32)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)
    assert all(t.isnan().all() for t in (layer.state(3), layer.context(3)))


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
@MODULES
def test_compose_beside_caches_of_half_the_bits(module: ModuleType, state: torch.dtype) -> None:
    layer, requests = every_kind_composed(SMALL, torch.float32, state)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


@MODULES
def test_islands_leave_the_state_as_it_was(module: ModuleType) -> None:
    """The state of the same walk without them."""
    plain, ours, kept = walks_around_islands(module, Layer.make(SMALL, 103))
    assert relative(ours.state(0), plain.state(0)) < TOLERANCE[torch.float32]
    assert torch.equal(ours.context(0), plain.context(0))
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


@settings(max_examples=25, deadline=None)
@given(
    steps=steps_of(70),
    resumed=st.booleans(),
    seed=st.integers(0, 1 << 16),
    module=st.sampled_from(list(ALL.values())),
)
def test_any_composition(
    steps: list[tuple[int, Mode, int]], resumed: bool, seed: int, module: ModuleType
) -> None:
    """Operations of any kind in any order, beside another request."""
    tokens, requests = composition(steps, resumed)
    layer = Layer.make(Shape(4, 2, 16, 16, taps=3), tokens, seed=seed)
    for slot in range(3):
        layer.random_record(slot, slot)
    layer.resume(1)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


@MODULES
def test_one_token_at_a_time(module: ModuleType) -> None:
    """Passes of one token, as in decoding, give what one pass gives."""
    layer = Layer.make(SMALL, 12)
    exact = layer.exact()
    run_compose(reference, exact, [(0, False, [(0, 12, -1, NONE)])])
    for t in range(12):
        run_compose(module, layer, [(0, t > 0, [(t, 1, -1, NONE)])])
    check_composed(layer, exact, [(0, True, [(0, 12, -1, NONE)])])


# ----------------------------------------------------------------------------- laws


@LAWFUL
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 64, 2), (65, 1, 130)], ids=str)
def test_records_of_parts_make_that_of_the_whole(module: ModuleType, lengths: tuple[int, ...]) -> None:
    without = check_parts(module, lambda n: Layer.make(Shape(4, 2, 8, 12), n, torch.float64), lengths)
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
    layer = Layer.make(Shape(2, 1, 8, 8), total, torch.float64, seed=seed)
    whole = layer.copy()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        # Run the text up to the interior, so that its convolution sees what stands before it, then record it.
        run_segments(module, layer, [Segment(1, 0, at + window + n, at + window, at + window + n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    layer.out.fill_(torch.nan)
    run_compose(module, layer, [(0, False, operations)])
    assert relative(layer.state(0), whole.state(0)) < 1e-12
    assert torch.equal(layer.context(0), whole.context(0))
    for first, count, _, _ in operations:
        if count:
            wanted = whole.outputs(first, first + count)
            assert relative(layer.outputs(first, first + count), wanted) < 1e-12


@MODULES
def test_log_t_of_a_long_segment(module: ModuleType) -> None:
    """32k tokens in passes of 1000: T itself is zero even in float64, its logarithm is exact."""
    tokens = 32_000
    layer = Layer.make(Shape(2, 1, 16, 16, taps=2), tokens)
    run_segments(module, layer, [Segment(0, 0, tokens, 2, tokens, 1)], list(range(1000, tokens, 1000)))
    d = F.softplus(layer.x.dt[PAD + 2 : PAD + tokens].double() + layer.weights.dt_bias)
    exact = (layer.weights.rate.double() * d).sum(0)
    assert (exact < -1000).all() and (exact.exp() == 0).all()
    torch.testing.assert_close(layer.records.log_transition[1].double(), exact, rtol=1e-7, atol=0)
    # What a sum in float32 would leave of it.
    single = torch.zeros(2)
    for step in layer.weights.rate * d.float():
        single += step
    assert relative(single, exact) > 1e-7


# ----------------------------------------------------------------------------- others' code


def test_the_reference_is_the_published_recurrence() -> None:
    """Against the chunked scan of transformers' Mamba2, in float32."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    gen = torch.Generator().manual_seed(0)
    n, H, G, P, N = 150, 6, 2, 8, 16

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen)

    x, dt, B, C, S = normal(n, H, P), normal(n, H), normal(n, G, N), normal(n, G, N), normal(H, P, N)
    A, D, bias = -torch.rand(H, generator=gen), normal(H), normal(H)
    theirs, state = mamba2_chunk_scan(
        *(x[None], dt[None], A, B[None], C[None], 32),
        D=D,
        dt_bias=bias,
        initial_states=S[None],
        dt_softplus=True,
        return_final_states=True,
    )
    ours, after = reference.scan(x, F.softplus(dt.double() + bias), A, B, C, D, S)
    assert relative(theirs[0], ours) < 1e-6 and relative(state[0], after) < 1e-6


def test_the_reference_convolves_as_torch_does() -> None:
    layer = Layer.make(Shape(1, 1, 4, 4), 30, torch.float64)
    run_compose(reference, layer, [(0, False, [(0, 30, -1, NONE)])])
    rows, w = layer.x.mixed[PAD : PAD + 30], layer.weights
    assert w.bias is not None
    padded = F.pad(rows.T, (3, 0))[None]
    total = F.conv1d(padded, w.weight.double().T[:, None], w.bias.double(), groups=12)[0].T
    x, B, C = F.silu(total).split(4, dim=-1)
    d = F.softplus(layer.x.dt[PAD : PAD + 30] + w.dt_bias)
    zero = torch.zeros(1, 4, 4)
    y, state = reference.scan(x[:, None], d, w.rate, B[:, None], C[:, None], w.D, zero)
    assert relative(layer.outputs(0, 30), y) < 1e-12 and relative(layer.state(0), state) < 1e-12
    assert torch.equal(layer.context(0), rows[-3:])
