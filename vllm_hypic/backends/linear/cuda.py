"""What linear layers share on CUDA: the plans of a pass, its cache slots, and plans to warm up with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...pool.shared import Once
from ..ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack
from .layout import Composed, Segments

if TYPE_CHECKING:
    from ..ops.linear_layer.triton.plan import ComposePlan, SegmentPlan

# The planning module imports Triton, which CPU installations lack: it is imported when a pass needs it.


@dataclass
class SharedPlans:
    """Of one pass, made by the first layer that asks."""

    _segments: Once[SegmentPlan] = field(default_factory=Once)
    _compose: dict[int, tuple[Composed, ComposePlan]] = field(default_factory=dict)
    _slots: dict[int, tuple[object, torch.Tensor]] = field(default_factory=dict)
    """By the identity of what they are of, which is kept beside, so that no other can have its address."""

    def segments(self, segments: Segments, device: torch.device) -> SegmentPlan:
        from ..ops.linear_layer.triton.plan import plan_segments

        return self._segments(lambda: plan_segments(segments.rows, device))

    def compose(self, composed: Composed, device: torch.device) -> ComposePlan:
        from ..ops.linear_layer.triton.plan import plan_compose

        if id(composed) not in self._compose:
            self._compose[id(composed)] = composed, plan_compose(composed.rows, composed.ops, device)
        return self._compose[id(composed)][1]

    def slots(self, metadata: Any, slots: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """``slots(metadata)``: cache slots by batch row, contiguous."""
        if id(metadata) not in self._slots:
            self._slots[id(metadata)] = metadata, slots(metadata)
        return self._slots[id(metadata)][1]


def warm_up_plans(device: torch.device) -> Iterator[tuple[int, SegmentPlan, ComposePlan]]:
    """For every length of chunk: token rows of an input, and plans of operators over these, which compile all
    that a pass runs.  Batch row 0 and record slot 0 are all that they use."""
    from ..ops.linear_layer.triton.plan import CHUNKS, plan_compose, plan_segments

    for n in CHUNKS:
        segment = SegmentRow(
            batch_row=0,
            resumed=0,
            first=0,
            stop=n,
            begin=0,
            end=n,
            slot=0,
            leading=0,
            begins=1,
            ends=1,
            has_head=0,
            carry=-1,
        )
        rows = pack([ComposeRow(0, 0, 0, 2)], ComposeRow)
        ops = pack([ComposeOp(0, n, 0, Mode.TRANSITION), ComposeOp(n, n, -1, Mode.NONE)], ComposeOp)
        yield 2 * n, plan_segments(pack([segment], SegmentRow), device), plan_compose(rows, ops, device)
