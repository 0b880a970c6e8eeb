"""Layer operators of every linear family, in C++ and in PyTorch, against the float64 token loop, amid poison.

`kinds.py` has a row for each. Tolerances are relative Frobenius errors: layers say them, and
`test_layer_operators` those of the gated delta rule.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.program import Mode

from . import decaying
from .decaying import scanned
from .kinds import (
    BF16,
    BOTH_MODULES,
    CONVOLVED,
    DECAYING,
    F32,
    F64,
    IDS,
    KINDS,
    LAWFUL,
    MODULES,
    Kind,
    each,
    served,
)
from .layers import PAD, SLOTS, Segment, packed, relative, run_compose, run_segments
from .test_layer_operators import T_FP16

NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode
MAMBA2 = KINDS["mamba2"]
SINGLE = 1e-6
"""What float32 holds of an island's state."""


@served(lambda kind: [*product(kind.shapes, kind.dtypes)])
def test_segments(kind: Kind, modules: list[str], given: tuple[Any, torch.dtype]) -> None:
    """All sizes packed, amid poison; windows of 8, 3 and 0 tokens, one leading segment."""
    shape, dtype = given
    for sizes in kind.sizes:
        tokens, segments = packed(sizes, kind.windows)
        kind.check_segments(modules, kind.inputs.Layer.make(shape, tokens, dtype), segments)


@served(lambda kind: [*product([kind.small], [d for d in kind.dtypes if d != BF16], kind.cuts)])
def test_segments_in_several_passes(kind: Kind, modules: list[str], given: tuple[Any, ...]) -> None:
    """Cuts before the interior, at its edges, inside, and behind it."""
    _, dtype, cuts = given
    n = kind.tokens
    layer = kind.make("passes", n + 50, dtype=dtype)
    leading = Segment(1, n + 30, 20, 0, 20, 0, True)
    segments = [Segment(0, 0, n, 8, n - 8, 1), Segment(2, n, 30, 0, 30, 3), leading]
    in_passes = kind.check_segments(modules, layer, segments, *cuts)
    if kind.one_pass and modules[0] == "native":
        run_segments(kind.operators("native"), layer, segments)
        assert torch.equal(in_passes[0].records.state[[0, 1, 3]], layer.records.state[[0, 1, 3]])
        assert torch.equal(in_passes[0].outputs(0, n + 50), layer.outputs(0, n + 50))
    if cuts[-1] < 8:
        for ours in in_passes:
            carried = next(iter(vars(ours.carries[0]).values()))
            assert carried.isnan().all(), "nothing to carry before the interior"


@BOTH_MODULES
@each()
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 150),
    window=st.integers(0, 9),
    tail=st.booleans(),
    cuts=st.sets(st.integers(1, 149), max_size=5),
    seed=st.integers(0, 1 << 16),
)
def test_any_segment_in_any_passes(
    kind: Kind, modules: list[str], tokens: int, window: int, tail: bool, cuts: set[int], seed: int
) -> None:
    lo = min(window, tokens - 1)
    hi = max(lo + 1, tokens - window) if tail else tokens
    layer = kind.make("any passes", tokens, seed=seed)
    inside = sorted(c for c in cuts if c < tokens)
    kind.check_segments(modules, layer, [Segment(0, 0, tokens, lo, hi, 2)], *inside)


@MODULES
@pytest.mark.parametrize(("kind", "what"), [
    pytest.param(kind, what, id=f"{name}-{what}") for name, kind in KINDS.items() for what in kind.broken
])  # fmt: skip
def test_what_is_no_number_is_not_passed_over(kind: Kind, what: str, module: str) -> None:
    """From the broken token on everything is NaN; chunks before it do not change."""
    n, at = kind.tokens, 3 * kind.tokens // 4
    right, wrong = (kind.make("broken", n) for _ in range(2))
    getattr(wrong.x, what)[PAD + at] = torch.nan
    for layer in (right, wrong):
        run_segments(kind.operators(module), layer, [Segment(0, 0, n, 8, n - 8, 1)])
    assert not right.outputs(0, n).isnan().any()
    assert wrong.outputs(at, at + 1).isnan().all()
    if kind.broken[what]:
        assert wrong.outputs(at, n).isnan().all() and wrong.state(0).isnan().all()
        assert wrong.records.state[1].isnan().all()
    before = at // kind.chunk * kind.chunk
    assert before and torch.equal(wrong.outputs(0, before), right.outputs(0, before))


@BOTH_MODULES
@pytest.mark.parametrize(("kind", "value"), [
    pytest.param(kind, value, id=f"{name}-{value}") for name, kind in KINDS.items() for value in kind.extremes
])  # fmt: skip
def test_extreme_decays(kind: Kind, value: float, modules: list[str]) -> None:
    n = kind.tokens - 20
    layer = kind.extreme(kind.make("extremes", n), value)
    for ours in kind.check_segments(modules, layer, [Segment(0, 0, n, 8, n - 8, 1)]):
        if kind.folder == "gated_delta":
            assert (ours.records.block_of[1] < 0).all() == (value <= -0.5)


# ----------------------------------------------------------------------------- composed requests


@served(lambda kind: kind.caches)
def test_compose(kind: Kind, modules: list[str], given: tuple[Any, torch.dtype, torch.dtype]) -> None:
    for layer in kind.check_composed(modules, *kind.composed(*given)):
        held = [*vars(layer.caches).values()][1:]
        assert all(each[int(layer.caches.slots[3])].isnan().all() for each in held)


@MODULES
@each()
def test_islands_leave_the_state_as_it_was(kind: Kind, module: str) -> None:
    """The state of the same walk without them; were they kept, the record would find them in it."""
    layer = kind.make("islands", 103)
    for slot in (0, 1):
        layer.random_record(slot, slot)
    walk = [(0, 8, 0, TRANSITION), (90, 8, 1, TRANSITION), (98, 5, -1, NONE)]
    inside = [(8, 70, -1, RESTORE), (78, 12, -1, RESTORE)]
    islands = [(0, 8, -1, NONE), *inside, (90, 0, 0, TRANSITION), *walk[1:]]
    stay = [(a, n, s, NONE if m == RESTORE else m) for a, n, s, m in islands]
    without, within = kind.shifts or (None, None)
    plain, ours, kept = worlds = [layer.copy() for _ in range(3)]
    for world, operations, by in zip(worlds, (walk, islands, stay), (without, within, within), strict=True):
        run_compose(kind.operators(module), world, [(0, False, operations)], by)
    if kind.same_bits or module == "native":
        assert torch.equal(ours.state(0), plain.state(0))
    assert relative(ours.state(0), plain.state(0)) < SINGLE
    assert kind.name not in CONVOLVED or torch.equal(ours.context(0), plain.context(0))
    assert relative(kept.state(0), plain.state(0)) > 100 * SINGLE


@BOTH_MODULES
@each(DECAYING)
@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(kind: Kind, modules: list[str], mode: Mode) -> None:
    layer = kind.make("modes", 20)
    layer.random_record(0, 0)
    layer.added_up()[0] = torch.nan
    kind.check_composed(modules, layer, [(0, False, [(0, 9, 0, mode), (9, 11, -1, NONE)])])


@BOTH_MODULES
@each(DECAYING)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), resumed=st.booleans(), seed=st.integers(0, 1 << 16))
def test_any_composition(
    kind: Kind, modules: list[str], data: st.DataObject, resumed: bool, seed: int
) -> None:
    """Operations of any kind in any order, beside another request."""
    step = st.tuples(st.integers(0, kind.longest), st.sampled_from(list(Mode)), st.integers(0, 2))
    at, operations = 0, []
    for n, mode, slot in data.draw(st.lists(step, min_size=1, max_size=8)):
        operations.append((at, n, slot if mode.applies else -1, mode))
        at += n
    another = (0, False, [(at, 5, -1, NONE), (0, 0, 1, REPLACE)])
    requests = [another, (1, resumed, [*operations, (at, 0, 0, TRANSITION)])]
    layer = kind.make("any composition", at + 5, seed=seed)
    for slot in range(3):
        layer.random_record(slot, slot)
    layer.resume(1)
    kind.check_composed(modules, layer, requests)


@MODULES
@each()
def test_one_token_at_a_time(kind: Kind, module: str) -> None:
    """Passes of one token, as in decoding, give what one pass gives."""
    layer = kind.make("tokens", 12)
    exact = layer.exact()
    run_compose(kind.operators("reference"), exact, [(0, False, [(0, 12, -1, NONE)])], [0])
    for t in range(12):
        run_compose(kind.operators(module), layer, [(0, t > 0, [(t, 1, -1, NONE)])], [0])
    kind.checks.check_composed(layer, exact, [(0, True, [(0, 12, -1, NONE)])])


# ----------------------------------------------------------------------------- laws


@LAWFUL
@each(DECAYING)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 64, 2), (65, 1, 130)], ids=str)
def test_records_of_parts_make_that_of_the_whole(kind: Kind, module: str, lengths: tuple[int, ...]) -> None:
    """Each recorded behind what stands before it: any two neighbours compose, and the state behind anything
    is T S + S_C."""
    head, total = 5, 5 + sum(lengths)
    layer, operators = kind.make("parts", total, dtype=F64), kind.operators(module)
    a, b, c = (head + sum(lengths[:i]) for i in range(3))
    parts = {0: (a, b), 1: (b, c), 2: (c, total), 3: (a, c), 4: (b, total), 5: (a, total)}
    for slot, (lo, hi) in parts.items():
        run_segments(operators, layer, [Segment(slot, 0, hi, lo, hi, slot)])
    S, T, sums = layer.records.state, [layer.transition(slot) for slot in range(6)], layer.added_up()
    for left, right, whole in ((0, 1, 3), (1, 2, 4), (3, 2, 5), (0, 4, 5)):
        assert relative(T[right] * S[left] + S[right], S[whole]) < 1e-12
        torch.testing.assert_close(sums[left] + sums[right], sums[whole], rtol=1e-12, atol=0)
    before, after = (scanned(operators, layer, 0, 0, tokens) for tokens in (a, total))
    assert relative(T[5] * before + S[5], after) < 1e-12
    forgotten = kind.folder == "decay_attention" and sum(lengths) > 100
    assert relative(before + S[5], after) > 1e-3 or forgotten, "leaving T out must not go unnoticed"


@pytest.mark.parametrize(("kind", "module"), [
    pytest.param(kind, module, id=f"{name}-{IDS[module]}")
    for name, kind in KINDS.items() if "decay" not in name
    for module in ("eager", "reference" if kind in DECAYING.values() else "native")
])  # fmt: skip
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.integers(0, 5),
    seed=st.integers(0, 1 << 16),
)
def test_composition_is_one_scan(kind: Kind, module: str, lengths: list[int], window: int, seed: int) -> None:
    """Records of a text's pieces, and the windows between them: outputs and state of one scan.

    Pieces lie apart by their windows, and each record is captured behind its right context, so the law holds
    exactly; where T is stored in fp16, to that.
    """
    total = sum(n + window for n in lengths)
    layer = kind.make("scan", total, seed=seed, dtype=F64 if F64 in kind.dtypes else F32)
    whole, operators = layer.exact(), kind.operators(module)
    run_compose(kind.operators("reference"), whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        # Run the text up to the interior, so that a convolution sees what stands before it, then record it.
        run_segments(operators, layer, [Segment(1, 0, at + window + n, at + window, at + window + n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    layer.out.fill_(torch.nan)
    run_compose(operators, layer, [(0, False, operations)])
    if kind in DECAYING.values():
        whole.out[layer.out.isnan()] = torch.nan
        decaying.check_composed(layer, whole, [(0, False, operations)])
        return
    assert relative(layer.state(0), whole.state(0)) < T_FP16
    assert torch.equal(layer.context(0), whole.context(0))
    if len(lengths) > 1 and window:
        naive = [(a, n, s, ADD if m == TRANSITION else m) for a, n, s, m in operations]
        run_compose(operators, layer, [(0, False, naive)])
        assert relative(layer.state(0), whole.state(0)) > 5 * T_FP16, "leaving T out must not go unnoticed"


@MODULES
@each({name: kind for name, kind in DECAYING.items() if name != "constant-decay"})
def test_sums_of_a_long_segment(kind: Kind, module: str) -> None:
    """32k tokens in passes of 1000: T is zero even in float64, the sum that is its logarithm is exact."""
    tokens = 32_000
    layer = kind.make("long", tokens)
    if kind.name == "mamba1":
        layer = layer.with_steps(-1.5)
        layer.x.dt.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    segment = Segment(0, 0, tokens, 2, tokens, 1)
    run_segments(kind.operators(module), layer, [segment], list(range(1000, tokens, 1000)))
    summands = layer.summands(2, tokens)
    exact = summands.sum(0)
    assert (exact.abs() > 1000).all() and (layer.transition(1) == 0).all()
    torch.testing.assert_close(layer.added_up()[1].double(), exact, rtol=1e-7, atol=0)
    # What a sum in float32 would leave of it.
    single = torch.zeros_like(exact, dtype=F32)
    for step in summands.float():
        single += step
    assert relative(single, exact) > 1e-7
    assert layer.records.state[1].isfinite().all()


# ----------------------------------------------------------------------------- threads, layouts, arguments


@each()
def test_threads_change_no_bit(kind: Kind) -> None:
    """More tasks than threads, several times: threads that shared scratch memory would be seen."""
    threads, worlds, native = torch.get_num_threads(), [], kind.operators("native")
    n = kind.tokens + 100
    try:
        for count in (1, 4, 4, 4, 16):
            torch.set_num_threads(count)
            layer = kind.make("threads", 2 * n, dtype=BF16)
            run_segments(native, layer, [Segment(i, n * i, n, 8, n - 8, i) for i in range(2)], [100])
            requests = [(3, False, [(0, n, 0, TRANSITION), (n, n, 1, TRANSITION)])]
            run_compose(native, layer, requests, [0, 0])
            worlds.append(layer)
    finally:
        torch.set_num_threads(threads)
    one, *others = worlds
    for other in others:
        assert torch.equal(one.outputs(0, 2 * n), other.outputs(0, 2 * n))
        for mine, theirs in ((one.caches, other.caches), (one.records, other.records)):
            for name, held in vars(mine).items():
                assert torch.equal(held.nan_to_num(), getattr(theirs, name).nan_to_num()), name


@MODULES
@each({name: KINDS[name] for name in CONVOLVED})
def test_dimension_first_conv_caches(kind: Kind, module: str) -> None:
    """vLLM can keep the convolution's rows innermost: one layout must give the other's bits."""
    operators, layer = kind.operators(module), kind.make("layouts", 60, dtype=BF16)
    layer.random_record(0, 0)
    other = layer.copy()
    turned = other.caches.conv.transpose(1, 2).contiguous().transpose(1, 2)
    other = replace(other, caches=replace(other.caches, conv=turned))
    assert turned.stride() != layer.caches.conv.contiguous().stride()
    for world in (layer, other):
        run_segments(operators, world, [Segment(0, 0, 30, 8, 22, 1)], [2, 14])
        run_compose(operators, world, [(1, False, [(30, 2, 0, TRANSITION)])])
        run_compose(operators, world, [(1, True, [(32, 8, 0, TRANSITION), (40, 2, -1, NONE)])])
    for row in (0, 1):
        assert torch.equal(layer.context(row), other.context(row))
        assert torch.equal(layer.state(row), other.state(row))


@each()
def test_programs_that_leave_their_tensors_are_refused(kind: Kind) -> None:
    layer, native = kind.make("programs", 20), kind.operators("native")
    good = Segment(0, 0, 20, 0, 20, 1)
    bad = ({"tokens": 40, "hi": 20}, "rows"), ({"batch_row": SLOTS}, "batch row"), ({"slot": SLOTS}, "record")
    for changes, message in bad:
        with pytest.raises(IndexError, match=message):
            run_segments(native, layer, [replace(good, **changes)])
    with pytest.raises(IndexError, match="record"):
        run_compose(native, layer, [(0, False, [(0, 1, SLOTS, TRANSITION)])])
    if kind.folder.startswith("mamba"):
        with pytest.raises(IndexError, match="carries number"):
            run_segments(native, replace(layer, carries=[]), [good], [10])
    if kind.folder == "gated_delta":
        layer.records.block_of[1] = -1
        with pytest.raises(IndexError, match="transition block"):
            run_segments(native, layer, [good])
    assert layer.out.isnan().all()


# ----------------------------------------------------------------------------- what Mamba2's records keep


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
@MODULES
def test_caches_of_half_the_bits(module: str, state: torch.dtype) -> None:
    """States are rounded where a pass ends, as stock code rounds them; records hold nothing of that."""
    segment, cuts, reference = Segment(0, 0, 200, 8, 192, 1), [64, 100], MAMBA2.operators("reference")
    layer = MAMBA2.make("halves", 200, state=state)
    rounded, whole = layer.copy(), layer.exact()
    run_segments(reference, whole, [segment])
    run_segments(reference, rounded, [segment], cuts)
    run_segments(MAMBA2.operators(module), layer, [segment], cuts)
    assert layer.state(0).dtype == state
    # An element at a rounding edge falls to either side.
    step = decaying.CACHE_STEP[state]
    assert relative(layer.state(0), rounded.state(0)) < 0.05 * step
    assert relative(layer.state(0), whole.state(0)) < step
    assert relative(layer.outputs(0, 200), rounded.outputs(0, 200)) < 0.05 * step
    assert relative(layer.records.state[1], whole.records.state[1]) < layer.tolerance[F32]
    # What the difference of states would give.
    T, meets = whole.transition(1), scanned(reference, layer.exact(), 1, 0, 8)
    difference = scanned(reference, layer.copy(), 1, 0, 192).double() - T * meets
    assert relative(difference, whole.records.state[1]) > 100 * layer.tolerance[F32]


@MODULES
def test_a_record_beside_a_large_state(module: str) -> None:
    """T near 1 and a state a million times what the interior adds: the record does not feel it."""
    layer, operators = MAMBA2.make("large", 100).with_decay(-1e-5), MAMBA2.operators(module)
    layer.x.mixed[PAD + 8 - 4 : PAD + 8] *= 1e6
    exact = layer.exact()
    # The convolution's reach is in the window, so that the interior's own inputs are ordinary.
    segment = Segment(0, 0, 100, 12, 100, 1)
    run_segments(MAMBA2.operators("reference"), exact, [segment])
    run_segments(operators, layer, [segment])
    record, wanted = layer.records.state[1], exact.records.state[1]
    assert layer.state(0).norm() > 1e6 * record.norm()
    assert relative(record, wanted) < layer.tolerance[F32]
    difference = layer.state(0) - layer.transition(1) * scanned(operators, layer.copy(), 1, 0, 12)
    assert relative(difference, wanted) > 1e-3
