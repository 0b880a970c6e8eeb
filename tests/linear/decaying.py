"""What tests of layers have in common whose states decay elementwise, by numbers that no write changes:
Mamba1, Mamba2, decaying linear attention.  T of a run of tokens is the exponential of a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_hypic.backends.ops.program import Mode

from .inputs import relative
from .layers import PAD, SLOTS, Composed, Segment, World, every_kind, run_compose, run_segments

NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode
CACHE_STEP = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a step of a cache's dtype, relative."""


class DecayingLayer(World):
    """Its records' sums add up over tokens."""

    sums: ClassVar[str] = "log_transition"
    """The records' field that has them."""
    ended: ClassVar[float] = -torch.inf
    """Its value where T is zero, as a leading record has it."""
    tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
    """By dtype of the inputs, which are exact whatever it is: relative Frobenius errors of states."""
    out_tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}
    """Of outputs, which are rounded to that dtype."""
    sums_tolerance: ClassVar[float] = 1e-6

    def transition(self, slot: int) -> Tensor:
        """T of a record, float64, to be multiplied with its state."""
        return self.added_up()[slot].double().exp()

    def added_up(self) -> Tensor:
        """The sums of all records."""
        found: Tensor = getattr(self.records, self.sums)
        return found

    def summands(self, first: int, stop: int) -> Tensor:
        """What a record of these tokens adds up, float64."""
        raise NotImplementedError


LayerT = TypeVar("LayerT", bound=DecayingLayer)


def scanned(module: ModuleType, layer: DecayingLayer, batch_row: int, first: int, tokens: int) -> Tensor:
    """State after these tokens from zero."""
    run_compose(module, layer, [(batch_row, False, [(first, tokens, -1, NONE)])])
    return layer.state(batch_row).clone()


def every_kind_composed(
    make: Callable[[int], LayerT], *, added: int = 29, query: int = 3
) -> tuple[LayerT, list[Composed]]:
    """The layer made for so many tokens, and composed requests of every kind, of which one goes on from an
    earlier pass; none is of batch row 3."""
    tokens, requests = every_kind(added, query)
    layer = make(tokens)
    for slot in range(4):
        layer.random_record(slot, slot)
    layer.added_up()[2:4] = layer.ended
    layer.resume(2)
    return layer, requests


def steps_of(longest: int) -> st.SearchStrategy[list[tuple[int, Mode, int]]]:
    """Operations of any kind in any order: tokens, mode, record."""
    step = st.tuples(st.integers(0, longest), st.sampled_from(list(Mode)), st.integers(0, 2))
    return st.lists(step, min_size=1, max_size=8)


def composition(steps: Sequence[tuple[int, Mode, int]], resumed: bool) -> tuple[int, list[Composed]]:
    """The tokens of such steps and their request, of batch row 1, beside another request."""
    at, operations = 0, []
    for n, mode, slot in steps:
        operations.append((at, n, slot if mode.applies else -1, mode))
        at += n
    return at + 5, [
        (0, False, [(at, 5, -1, NONE), (0, 0, 1, REPLACE)]),
        (1, resumed, [*operations, (at, 0, 0, TRANSITION)]),
    ]


def walks_around_islands(
    module: ModuleType, layer: Any, shifts: tuple[Sequence[int], Sequence[int]] | None = None
) -> tuple[Any, Any, Any]:
    """Copies of the layer behind a walk past two records, behind the same with islands, and with islands that
    stay in the state, where the second record finds them."""
    for slot in (0, 1):
        layer.random_record(slot, slot)
    plain = [(0, 8, 0, TRANSITION), (90, 8, 1, TRANSITION), (98, 5, -1, NONE)]
    islands = [(0, 8, -1, NONE), (8, 70, -1, RESTORE), (78, 12, -1, RESTORE), (90, 0, 0, TRANSITION),
               (90, 8, 1, TRANSITION), (98, 5, -1, NONE)]  # fmt: skip
    kept = [(a, n, s, NONE if m == RESTORE else m) for a, n, s, m in islands]
    without, within = shifts or (None, None)
    worlds = layer.copy(), layer.copy(), layer.copy()
    for world, operations, by in zip(worlds, (plain, islands, kept), (without, within, within), strict=True):
        run_compose(module, world, [(0, False, operations)], by)
    return worlds


def check_segments(
    ours: DecayingLayer, exact: DecayingLayer, segments: Sequence[Segment], before: object = None
) -> None:
    """Outputs, states, contexts of convolutions and records; nothing else is written."""
    dtype = ours.out.dtype
    step, exactly = CACHE_STEP[ours.caches.state.dtype], dtype == torch.float64
    for s in segments:
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        assert relative(ours.out[rows], exact.out[rows]) < ours.out_tolerance[dtype], s
        state, wanted = ours.state(s.batch_row), exact.state(s.batch_row)
        assert relative(state, wanted) < ours.tolerance[dtype] + step, s
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < ours.tolerance[dtype], s
        # Finite, and of relative precision, which is an absolute one of T.
        sums = [layer.added_up()[s.slot].double() for layer in (ours, exact)]
        torch.testing.assert_close(*sums, rtol=1e-12 if exactly else ours.sums_tolerance, atol=0)
        assert s.leading == bool(sums[0].isinf().all())
        if hasattr(ours.caches, "conv"):
            assert torch.equal(ours.records.conv_tail[s.slot], exact.records.conv_tail[s.slot])
            assert torch.equal(ours.context(s.batch_row), exact.context(s.batch_row))
    assert torch.equal(ours.out.isnan(), exact.out.isnan())
    others = [i for i in range(SLOTS) if i not in {s.slot for s in segments}]
    assert all(held[others].isnan().all() for held in vars(ours.records).values())
    assert torch.equal(ours.caches.state.isnan(), exact.caches.state.isnan())


def check_composed(ours: DecayingLayer, exact: DecayingLayer, requests: Sequence[Composed]) -> None:
    """States and outputs of these requests; nothing else is written."""
    dtype = ours.out.dtype
    for row, _, operations in requests:
        tolerance = ours.tolerance[dtype] + CACHE_STEP[ours.caches.state.dtype]
        assert relative(ours.state(row), exact.state(row)) < tolerance, row
        if hasattr(ours.caches, "conv"):
            assert torch.equal(ours.context(row), exact.context(row)), row
        for at, count, _, _ in operations:
            if count:
                wanted = exact.outputs(at, at + count)
                assert relative(ours.outputs(at, at + count), wanted) < ours.out_tolerance[dtype], (row, at)
    assert torch.equal(ours.out.isnan(), exact.out.isnan())


def check_parts(module: ModuleType, make: Callable[[int], DecayingLayer], lengths: Sequence[int]) -> float:
    """A text's parts, each recorded behind what stands before it: any two neighbours compose, and the state
    behind anything is T S + S_C.  How far it would be without T."""
    head, total = 5, 5 + sum(lengths)
    layer = make(total)
    a, b, c = (head + sum(lengths[:i]) for i in range(3))
    parts = {0: (a, b), 1: (b, c), 2: (c, total), 3: (a, c), 4: (b, total), 5: (a, total)}
    for slot, (lo, hi) in parts.items():
        run_segments(module, layer, [Segment(slot, 0, hi, lo, hi, slot)])
    S, T, sums = layer.records.state, [layer.transition(slot) for slot in range(6)], layer.added_up()
    for left, right, whole in ((0, 1, 3), (1, 2, 4), (3, 2, 5), (0, 4, 5)):
        assert relative(T[right] * S[left] + S[right], S[whole]) < 1e-12
        torch.testing.assert_close(sums[left] + sums[right], sums[whole], rtol=1e-12, atol=0)
    before, after = scanned(module, layer, 0, 0, a), scanned(module, layer, 0, 0, total)
    assert relative(T[5] * before + S[5], after) < 1e-12
    return relative(before + S[5], after)
