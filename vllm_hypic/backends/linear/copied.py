"""Programs over records that operators cannot use in place (``pool/narrow_states.py``).

Each call of one layer copies the records that its program names, and numbers the copies from 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...pool.narrow_states import CopiedRecords
from ...pool.shared import OncePer
from ..ops.program import ComposeOp, SegmentRow, unpack
from .layout import Composed, Segments

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import StepContext
    from ...pool.tensors import StateRecords


@contextmanager
def reading(runtime: HypicRuntime, step: StepContext, layer: str, composed: Composed) -> Iterator[Composed]:
    """Yield ``composed`` with numbers of copies as slots, for operators that run inside this context."""
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
    """Yield ``segments`` with numbers of copies as slots; on exit, write the complete records to the pool."""
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
    """Yield records that float32 arithmetic can use, and the numbers of ``slot`` and ``base`` in them; on
    exit, write the record in ``slot`` to the pool."""
    records = runtime.pool.linear[layer]
    if not isinstance(records, CopiedRecords):
        yield records, slot, base
        return
    slots = torch.tensor([slot, base], device=runtime.pool.device)
    copies = records.read(slots)
    yield copies, 0, 1
    records.write(slots[:1], copies, torch.zeros_like(slots[:1]))


class _Numbered(OncePer):
    """The slots that a program names, and the program with numbers in their place.  All layers of a pass get
    the same program object, which is the key of other values that layers share."""


def _numbered(
    program: torch.Tensor, kind: type[ComposeOp] | type[SegmentRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that rows of ``kind`` name, unique, int64, and ``program`` with numbers in their
    place.  Rows without a record keep slot -1."""
    slot = kind._fields.index("slot")
    named = program[:, slot] >= 0
    slots, numbers = torch.unique(program[named, slot], return_inverse=True)
    numbered = program.clone()
    numbered[named, slot] = numbers
    return slots, numbered
