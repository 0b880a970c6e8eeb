"""What tests of layers have in common whose states decay elementwise, by numbers that no write changes:
Mamba1, Mamba2, decaying linear attention.  T of a run of tokens is the exponential of a sum."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .layers import NONE, PAD, SLOTS, Composed, Segment, World, every_kind, relative, run_compose

CACHE_STEP = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a step of a cache's dtype, relative."""


class DecayingLayer(World):
    """Its records' sums add up over tokens."""

    sums: ClassVar[str] = "log_transition"
    """The records' field that has them."""
    ended: ClassVar[float] = -torch.inf
    """Its value where T is zero, as a leading record has it."""
    most: ClassVar[float]
    """Of a random record's sums."""
    tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
    """By dtype of the inputs, which are exact whatever it is: relative Frobenius errors of states."""
    out_tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}
    """Of outputs, which are rounded to that dtype."""
    sums_tolerance: ClassVar[float] = 1e-6

    @classmethod
    def make(
        cls,
        shape: Any,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Self:
        """``dtype``: of the inputs; in float64 all else is, too.  ``state``: of vLLM's cache."""
        others = (dtype, dtype) if dtype == torch.float64 else (torch.float32, state)
        return cls.drawn(shape, tokens + 2 * PAD, torch.Generator().manual_seed(seed), dtype, *others)

    @classmethod
    def drawn(cls, shape: Any, rows: int, gen: torch.Generator, *dtypes: torch.dtype) -> Self:
        """``dtypes``: of the inputs, of what is float32 in other layers, of vLLM's cache of states."""
        raise NotImplementedError

    @classmethod
    def every_kind_composed(cls, added: int, shape: Any, *dtypes: torch.dtype) -> tuple[Self, list[Composed]]:
        """A layer, and composed requests of every kind, of which one goes on from an earlier pass; none is of
        batch row 3."""
        tokens, requests = every_kind(added, 3)
        layer = cls.make(shape, tokens, *dtypes)
        for slot in range(4):
            layer.random_record(slot, slot)
        layer.added_up()[2:4] = layer.ended
        layer.resume(2)
        return layer, requests

    def transition(self, slot: int) -> Tensor:
        """T of a record, float64, to be multiplied with its state."""
        return self.added_up()[slot].double().exp()

    def added_up(self) -> Tensor:
        """The sums of all records."""
        return getattr(self.records, self.sums)

    def summands(self, first: int, stop: int) -> Tensor:
        """What a record of these tokens adds up, float64."""
        raise NotImplementedError

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        for name, field in vars(self.records).items():
            drawn = torch.rand if name == self.sums else torch.randn
            field[slot] = drawn(field[slot].shape, generator=gen).to(field.dtype)
        self.added_up()[slot] *= self.most


def scanned(module: ModuleType, layer: DecayingLayer, batch_row: int, first: int, tokens: int) -> Tensor:
    """State after these tokens from zero."""
    run_compose(module, layer, [(batch_row, False, [(first, tokens, -1, NONE)])])
    return layer.state(batch_row).clone()


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
