"""The layer operators, in C++ and in PyTorch, against the float64 token loop on the raw inputs.

Tolerances are relative Frobenius errors. float32 inputs: 1e-6. bfloat16 inputs are exact too, but their
convolution's result is rounded to bfloat16, and where float32 and float64 stand on two sides of a rounding
edge an element differs by 2^-8: 1e-4 for states (a handful of such elements), 4e-3 for outputs, which are
bfloat16. T is stored in fp16: half a step, 2^-11, of each element. Where channels have gates, twice as much
on states: decays are rounded token by token, all to the same side where all gates are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.gated_delta import DEAD_BELOW, choose, limits, native, reference
from vllm_hypic.backends.ops.gated_delta import torch as torch_ops
from vllm_hypic.backends.ops.program import Mode

from .inputs import relative
from .layer_inputs import (
    PAD,
    SLOTS,
    Layer,
    Segment,
    Shape,
    compose_program,
    every_kind_composed,
    segment_program,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-4}
OUT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
HALF_STEP = 2.0**-11
T_FP16 = 3e-4
"""States composed through a T in fp16: half a step at worst, where T is one nearly diagonal factor; 1.5e-4
for interiors of real length."""

SIZES = [1, 2, 31, 33, 63, 65, 500]
SHAPES = [
    Shape(1, 1, 16, 16),
    Shape(2, 4, 32, 32, bias=False),
    Shape(1, 3, 64, 80),
    Shape(2, 2, 16, 128, taps=2),
    Shape(2, 4, 128, 128),
    Shape(1, 2, 96, 192, bias=False, largest_beta=2.0),
    Shape(2, 2, 128, 128, bias=False, channel_gates=True),
    Shape(1, 2, 48, 16, taps=3, channel_gates=True, gate_bound=-5.0),
]

MODULES = pytest.mark.parametrize("module", [native, torch_ops], ids=["c++", "torch"])
GATES = pytest.mark.parametrize("channel_gates", [False, True], ids=["of-heads", "of-channels"])


def run_segments(
    module: ModuleType,
    layer: Layer,
    segments: Sequence[Segment],
    cuts: Sequence[int] = (),
    dead_below: float = DEAD_BELOW,
) -> None:
    """All segments at once, in passes that end at `cuts`."""
    ends = [*cuts, max(s.tokens for s in segments)]
    for start, stop in zip([0, *cuts], ends, strict=True):
        module.gdn_segments(
            layer.x,
            layer.weights,
            layer.caches,
            layer.out,
            layer.records,
            segment_program(segments, start, stop),
            layer.carries,
            dead_below,
        )


def bound(layer: Layer) -> float:
    """On the error of states."""
    tolerance = TOLERANCE[layer.x.mixed.dtype]
    return 2 * tolerance if layer.shape.channel_gates else tolerance


def output_error(out: torch.Tensor, exact: torch.Tensor, state: torch.Tensor) -> float:
    """Beside the outputs' own size that of a query's product with the state: they cancel in single rows."""
    size = exact.double().norm() + state.double().norm() * state.shape[1] ** -0.5
    return float((out.double() - exact.double()).norm() / size)


def check_segments(ours: Layer, exact: Layer, segments: Sequence[Segment], before: Layer) -> None:
    dtype = ours.x.mixed.dtype
    touched = torch.zeros(len(ours.out), dtype=torch.bool)
    for s in segments:
        context = (s, dtype)
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        touched[rows] = True
        state = exact.state(s.batch_row)
        assert output_error(ours.out[rows], exact.out[rows], state) < OUT_TOLERANCE[dtype], context
        assert relative(ours.state(s.batch_row), state) < bound(ours), context
        assert torch.equal(ours.context(s.batch_row), exact.context(s.batch_row)), context
        assert torch.equal(ours.records.conv_tail[s.slot], exact.records.conv_tail[s.slot]), context
        assert torch.equal(ours.records.block_of[s.slot], exact.records.block_of[s.slot]), context
        check_record(ours, exact, s)
    # Nothing else was written.
    assert ours.out[~touched].isnan().all()
    used = {s.slot for s in segments}
    for slot in set(range(SLOTS)) - used:
        assert ours.records.state[slot].isnan().all() and ours.records.conv_tail[slot].isnan().all()
        assert torch.equal(ours.records.block_of[slot], before.records.block_of[slot])
    alive = [t for s in segments for t in ours.records.block_of[s.slot].tolist() if t >= 0]
    others = sorted(set(range(len(ours.records.transitions))) - set(alive))
    assert ours.records.transitions[others].isnan().all()
    rows = {s.batch_row for s in segments}
    for row in set(range(SLOTS)) - rows:
        assert ours.state(row).isnan().all() and ours.context(row).isnan().all()


def fp16_of(T: torch.Tensor, exact: torch.Tensor, tolerance: float) -> bool:
    """Every element within half a step of fp16, and `tolerance` of its head's largest."""
    noise = tolerance * exact.abs().amax((-1, -2), keepdim=True) + 2.0**-25
    return bool(((T - exact).abs() <= HALF_STEP * exact.abs() + noise).all())


def check_record(ours: Layer, exact: Layer, s: Segment) -> None:
    """Judged as it is used: by the state that it makes of one like those it will meet."""
    assert not ours.records.state[s.slot].isnan().any()
    if s.leading:
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < bound(ours), s
        return
    gen = torch.Generator().manual_seed(1)
    meets = torch.randn(ours.records.state[s.slot].shape, generator=gen).double()
    T, exact_T = ours.transition(s.slot), exact.transition(s.slot)
    assert fp16_of(T, exact_T, bound(ours)), s
    zero, exact_zero = ours.records.state[s.slot].double(), exact.records.state[s.slot]
    after = exact_T @ meets + exact_zero
    assert relative(T @ meets + zero, after) < T_FP16, s
    # S alone: with T in full.
    assert relative(exact_T @ meets + zero, after) < bound(ours), s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@MODULES
def test_segments(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """All sizes packed in two calls, amid poison; windows of 8, 3 and 0 tokens, one leading segment."""
    for sizes in (SIZES[:4], SIZES[4:]):
        at, segments = 2, []
        for row, n in enumerate(sizes):
            lo = min((8, 3, 0, 0)[row], n - 1)
            hi = n if row % 2 else max(lo + 1, n - 8)
            segments.append(Segment(row, at, n, lo, hi, slot=SLOTS - 1 - row, leading=row == 3))
            at += n + row
        layer = Layer.make(shape, at, dtype)
        exact, before = layer.exact(), layer.copy()
        run_segments(reference, exact, segments)
        run_segments(module, layer, segments)
        check_segments(layer, exact, segments, before)


@pytest.mark.parametrize("cuts", [[1], [5], [8], [9], [40], [64], [192], [199], [3, 8, 50, 51, 194], [7, 9]])
@GATES
@MODULES
def test_segments_in_several_passes(module: ModuleType, channel_gates: bool, cuts: list[int]) -> None:
    """Cuts inside the window before the interior, at its edges, inside, and behind it."""
    layer = Layer.make(Shape(2, 4, 32, 48, channel_gates=channel_gates), 250)
    segments = [
        Segment(0, 0, 200, 8, 192, 1),
        Segment(2, 200, 30, 0, 30, 3),
        Segment(1, 230, 20, 0, 20, 0, True),
    ]
    cuts = [c for c in cuts if c < 200]
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, segments)
    run_segments(module, layer, segments, cuts)
    check_segments(layer, exact, segments, before)
    if cuts[-1] < 8:
        assert layer.carries[0].transition.isnan().all(), "nothing to carry before the interior"


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 90),
    window=st.integers(0, 9),
    tail=st.booleans(),
    cuts=st.sets(st.integers(1, 89), max_size=5),
    seed=st.integers(0, 1 << 16),
    channel_gates=st.booleans(),
    module=st.sampled_from([native, torch_ops]),
)
def test_any_segment_in_any_passes(
    tokens: int, window: int, tail: bool, cuts: set[int], seed: int, channel_gates: bool, module: ModuleType
) -> None:
    lo = min(window, tokens - 1)
    hi = max(lo + 1, tokens - window) if tail else tokens
    segment = Segment(0, 0, tokens, lo, hi, 2)
    layer = Layer.make(Shape(1, 2, 16, 16, taps=3, channel_gates=channel_gates), tokens, seed=seed)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment], sorted(c for c in cuts if c < tokens))
    check_segments(layer, exact, [segment], before)


@GATES
@MODULES
@pytest.mark.parametrize("what", ["mixed", "a", "b"])
def test_what_is_no_number_is_not_passed_over(module: ModuleType, channel_gates: bool, what: str) -> None:
    """From the broken token on everything is NaN; before it nothing changes."""
    worlds = [Layer.make(Shape(1, 2, 32, 32, channel_gates=channel_gates), 100) for _ in range(2)]
    broken = getattr(worlds[1].x, what)
    broken[PAD + 50] = float("nan")
    for layer in worlds:
        run_segments(module, layer, [Segment(0, 0, 100, 8, 92, 1)])
    right, wrong = worlds
    assert wrong.outputs(50, 100).isnan().all() and wrong.state(0).isnan().all()
    assert wrong.records.state[1].isnan().all()
    assert torch.equal(wrong.outputs(0, 32), right.outputs(0, 32)), "chunks before the broken one"


@GATES
@MODULES
@pytest.mark.parametrize("g", [-100.0, -3000.0, -0.5, -1e-4, 0.0])
def test_extreme_gates(module: ModuleType, channel_gates: bool, g: float) -> None:
    layer = Layer.make(Shape(1, 2, 64, 64, channel_gates=channel_gates), 130).with_gates(g)
    segment = Segment(0, 0, 130, 8, 122, 1)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    check_segments(layer, exact, [segment], before)
    assert (layer.records.block_of[1] < 0).all() == (g <= -0.5)


@GATES
@MODULES
def test_heads_die_exactly_when_t_rounds_to_zero(module: ModuleType, channel_gates: bool) -> None:
    """One interior, tolerances just above and just below its largest elements of T; and cut in pieces."""
    shape = Shape(2, 4, 32, 32, channel_gates=channel_gates)
    segment = Segment(0, 0, 70, 8, 70, 1)
    full = Layer.make(shape, 70).exact()
    run_segments(reference, full, [segment], dead_below=0.0)
    largest = full.transition(1).abs().amax((-1, -2))
    assert (largest > 0).all()
    for h in range(shape.heads):
        for factor in (1.001, 0.999):
            tolerance = float(largest[h]) * factor
            for cuts in ([], [20, 50]):
                layer = Layer.make(shape, 70)
                run_segments(module, layer, [segment], cuts, tolerance)
                assert ((layer.records.block_of[1] < 0) == (largest < tolerance)).all()
                alive = largest >= tolerance
                assert fp16_of(layer.transition(1)[alive], full.transition(1)[alive], bound(layer))


@MODULES
def test_a_head_that_died_in_an_earlier_pass_stays_dead(module: ModuleType) -> None:
    layer = Layer.make(Shape(1, 2, 32, 32), 150)
    layer = replace(layer, weights=replace(layer.weights, rate=torch.tensor([-40.0, -0.01])))
    segment = Segment(0, 0, 150, 8, 142, 1)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment], [100])
    assert layer.carries[0].alive.tolist() == [0, 1]
    check_segments(layer, exact, [segment], before)


# ----------------------------------------------------------------------------- composed requests


def run_compose(module: ModuleType, layer: Layer, requests: Sequence) -> None:
    rows, ops = compose_program(requests)
    module.gdn_compose(layer.x, layer.weights, layer.caches, layer.out, layer.records, rows, ops)


def check_composed(ours: Layer, exact: Layer, requests: Sequence, tolerance: float | None = None) -> None:
    dtype = ours.x.mixed.dtype
    for row, _, operations in requests:
        assert relative(ours.state(row), exact.state(row)) < (tolerance or bound(ours)), row
        assert torch.equal(ours.context(row), exact.context(row)), row
        for at, count, _, _ in operations:
            if count:
                wanted = exact.outputs(at, at + count)
                error = output_error(ours.outputs(at, at + count), wanted, exact.state(row))
                assert error < OUT_TOLERANCE[dtype], (row, at)
    touched = torch.zeros(len(ours.out), dtype=torch.bool)
    for _, _, operations in requests:
        for at, count, _, _ in operations:
            touched[PAD + at : PAD + at + count] = True
    assert ours.out[~touched].isnan().all()


NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@MODULES
def test_compose(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    layer, requests = every_kind_composed(shape, dtype, added=400, query=63)
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)
    untouched = layer.state(3), layer.context(3)
    assert all(t.isnan().all() for t in untouched)


@GATES
@MODULES
def test_islands_leave_the_state_as_it_was(module: ModuleType, channel_gates: bool) -> None:
    """Bit for bit the state of the same walk without them, and outputs of a scan from where each begins."""
    layer = Layer.make(Shape(1, 2, 16, 16, channel_gates=channel_gates), 200)
    for slot in (0, 1):
        layer.random_record(slot, slot)
    without = [(0, 8, 0, TRANSITION), (90, 8, 1, TRANSITION), (98, 5, -1, NONE)]
    islands = [(0, 8, -1, NONE), (8, 70, -1, RESTORE), (78, 12, -1, RESTORE), (90, 0, 0, TRANSITION),
               (90, 8, 1, TRANSITION), (98, 5, -1, NONE)]  # fmt: skip
    plain, ours, kept = layer.copy(), layer.copy(), layer.copy()
    run_compose(module, plain, [(0, False, without)])
    run_compose(module, ours, [(0, False, islands)])
    assert torch.equal(ours.state(0), plain.state(0)) or module is torch_ops
    assert relative(ours.state(0), plain.state(0)) < TOLERANCE[torch.float32]
    assert torch.equal(ours.context(0), plain.context(0))
    # Were they kept, the record would find them in the state.
    faulty = [(a, n, s, NONE if m == RESTORE else m) for a, n, s, m in islands]
    run_compose(module, kept, [(0, False, faulty)])
    assert relative(kept.state(0), plain.state(0)) > 100 * TOLERANCE[torch.float32]


@MODULES
def test_a_dead_head_reads_no_block(module: ModuleType) -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
    layer.random_record(0, 0, dead=[1])
    spare = [t for t in range(len(layer.records.transitions)) if t != int(layer.records.block_of[0, 0])]
    assert layer.records.transitions[spare].isnan().all()
    requests = [(0, False, [(0, 9, 0, TRANSITION), (9, 11, -1, NONE)])]
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.integers(0, 5),
    seed=st.integers(0, 1 << 16),
    channel_gates=st.booleans(),
    module=st.sampled_from([native, torch_ops]),
)
def test_composition_is_one_scan(
    lengths: list[int], window: int, seed: int, channel_gates: bool, module: ModuleType
) -> None:
    """Records of a text's pieces, each captured alone, and the windows between them: the state of one scan.

    Pieces lie apart by their windows; a piece's record is captured with its right context, so that nothing is
    approximate and the law holds to T's storage.
    """
    shape = Shape(1, 2, 16, 16, channel_gates=channel_gates)
    total = sum(n + window for n in lengths)
    layer = Layer.make(shape, total, seed=seed)
    whole = layer.exact()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])

    operations, at = [], 0
    for slot, n in enumerate(lengths):
        # Run the text up to the interior, so that its convolution sees what stands before it, then record it.
        segment = Segment(1, 0, at + window + n, at + window, at + window + n, slot)
        run_segments(module, layer, [segment])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    layer.out.fill_(torch.nan)
    run_compose(module, layer, [(0, False, operations)])
    assert relative(layer.state(0), whole.state(0)) < T_FP16
    assert torch.equal(layer.context(0), whole.context(0))
    naive = [(a, n, s, Mode.ADD if m == TRANSITION else m) for a, n, s, m in operations]
    if len(lengths) > 1 and window:
        run_compose(module, layer, [(0, False, naive)])
        assert relative(layer.state(0), whole.state(0)) > 5 * T_FP16, "leaving T out must not go unnoticed"


# ----------------------------------------------------------------------------- arguments


def test_dimension_first_conv_caches() -> None:
    """vLLM can keep the convolution's rows innermost: one layout must give the other's bits."""
    shape = Shape(2, 4, 16, 32)
    layer = Layer.make(shape, 60, torch.bfloat16)
    layer.random_record(0, 0)
    other = layer.copy()
    slots, conv, state = other.caches.slots, other.caches.conv, other.caches.state
    turned = conv.transpose(1, 2).contiguous().transpose(1, 2)
    other = replace(other, caches=replace(other.caches, conv=turned))
    assert turned.stride() != conv.contiguous().stride() and slots is not None and state is not None
    for world in (layer, other):
        run_segments(native, world, [Segment(0, 0, 30, 8, 22, 1)], [2, 14])
        run_compose(native, world, [(1, False, [(30, 2, 0, TRANSITION)])])
        run_compose(native, world, [(1, True, [(32, 8, 0, TRANSITION), (40, 2, -1, NONE)])])
    assert torch.equal(layer.context(0), other.context(0)) and torch.equal(layer.context(1), other.context(1))
    assert torch.equal(layer.state(0), other.state(0)) and torch.equal(layer.state(1), other.state(1))


def test_threads_change_no_bit() -> None:
    """More tasks than threads, several times: threads that shared scratch memory would be seen."""
    segments = [Segment(i, 300 * i, 300, 8, 292, i) for i in range(2)]
    threads = torch.get_num_threads()
    try:
        worlds = []
        for count in (1, 4, 4, 4, 16):
            torch.set_num_threads(count)
            layer = Layer.make(Shape(4, 8, 32, 64), 600, torch.bfloat16)
            run_segments(native, layer, segments, [100])
            run_compose(native, layer, [(3, False, [(0, 300, 0, TRANSITION), (300, 300, 1, TRANSITION)])])
            worlds.append(layer)
    finally:
        torch.set_num_threads(threads)
    one = worlds[0]
    for other in worlds[1:]:
        for row in (0, 1, 3):
            assert torch.equal(one.state(row), other.state(row))
            assert torch.equal(one.context(row), other.context(row))
        assert torch.equal(one.outputs(0, 600), other.outputs(0, 600))


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
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
    layer.records.block_of[1] = -1
    with pytest.raises(IndexError, match="transition block"):
        run_segments(native, layer, [good])
    assert layer.out.isnan().all()


def test_what_triton_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.limits, "refuses", lambda *_: None)  # as on a GPU that has all it takes
    layer = Layer.make(Shape(1, 2, 16, 16), 4)
    assert limits.refuses(layer.weights, layer.caches) is None
    strong = replace(layer.weights, largest_beta=2.0)
    assert limits.refuses(strong, layer.caches) == "write strengths up to 2, not 1"
    channels = Layer.make(Shape(1, 2, 16, 16, channel_gates=True), 4)
    assert limits.refuses(channels.weights, channels.caches) is None
    given = replace(channels.weights, gates_given=True)
    assert limits.refuses(given, channels.caches) is None
    assert "log decays" in str(native.refuses(given, channels.caches))


def test_a_bound_is_of_channels() -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 4)
    bounded = replace(layer, weights=replace(layer.weights, gate_bound=-5.0))
    with pytest.raises(ValueError, match="gate_bound is -5: expected 0 or, where channels have gates, less"):
        run_segments(native, bounded, [Segment(0, 0, 4, 0, 4, 1)])


def test_what_the_kernels_refuse_is_served_in_pytorch() -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 4)
    assert choose(layer.weights, layer.caches) is native
    odd = Layer.make(Shape(1, 2, 8, 16), 4)
    assert "multiples" in str(native.refuses(odd.weights, odd.caches))
    assert choose(odd.weights, odd.caches) is torch_ops
    half = replace(layer.caches, state=layer.caches.state.bfloat16())
    assert "bfloat16" in str(native.refuses(layer.weights, half))
