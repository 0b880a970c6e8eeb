"""Programs over records that operators cannot work on where they are kept (``pool/copied.py``): they run
over copies of those that they name, numbered from 0, which are made for one call of one layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...pool.copied import CopiedRecords
from ...pool.shared import OncePer
from ..ops.program import ComposeOp, SegmentRow, unpack
from .layout import Composed, Segments

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import StepContext
    from ...pool.tensors import StateRecords


@contextmanager
def reading(runtime: HypicRuntime, step: StepContext, layer: str, composed: Composed) -> Iterator[Composed]:
    """``composed`` as operators run it while this lasts."""
    records = runtime.pool.linear[layer]
    if not isinstance(records, CopiedRecords):
        yield composed
        return

    def numbered() -> tuple[torch.Tensor, Composed]:
        slots, ops = _numbered(composed.ops, ComposeOp)
        return slots, replace(composed, ops=ops)

    slots, program = step.shared.of(_Numbered)(composed, None, numbered)
    with runtime.pool.working(layer, records.read(slots.to(step.device))):
        yield program


@contextmanager
def capturing(runtime: HypicRuntime, step: StepContext, layer: str, segments: Segments) -> Iterator[Segments]:
    """``segments`` as operators run it while this lasts; then the records that became complete are kept."""
    records = runtime.pool.linear[layer]
    if not isinstance(records, CopiedRecords):
        yield segments
        return

    def numbered() -> tuple[torch.Tensor, Segments]:
        slots, rows = _numbered(segments.rows, SegmentRow)
        return slots, replace(segments, rows=rows)

    slots, program = step.shared.of(_Numbered)(segments, None, numbered)
    room = records.room(slots.to(step.device))
    with runtime.pool.working(layer, room):
        yield program
    numbers = torch.tensor([r.slot for r in unpack(program.rows, SegmentRow) if r.ends], dtype=torch.int64)
    records.write(slots[numbers].to(step.device), room, numbers.to(step.device))


@contextmanager
def appending(
    runtime: HypicRuntime, layer: str, slot: int, base: int
) -> Iterator[tuple[StateRecords, int, int]]:
    """The records of ``slot`` and ``base``, and their numbers, as float32 arithmetic takes them while this
    lasts; then the one in ``slot`` is kept."""
    records = runtime.pool.linear[layer]
    if not isinstance(records, CopiedRecords):
        yield records, slot, base
        return
    slots = torch.tensor([slot, base], device=runtime.pool.device)
    copies = records.read(slots)
    yield copies, 0, 1
    records.write(slots[:1], copies, torch.zeros_like(slots[:1]))


class _Numbered(OncePer):
    """Slots of the records that a program names, and the program with their numbers: layers of a pass share
    it, and find by it what else they share."""


def _numbered(
    program: torch.Tensor, kind: type[ComposeOp] | type[SegmentRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots that rows of ``kind`` name, each once, int64, and ``program`` with their numbers in their
    place; rows without a record stay so."""
    slot = kind._fields.index("slot")
    named = program[:, slot] >= 0
    slots, numbers = torch.unique(program[named, slot], return_inverse=True)
    numbered = program.clone()
    numbered[named, slot] = numbers
    return slots, numbered
