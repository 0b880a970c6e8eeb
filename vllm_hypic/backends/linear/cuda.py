"""What linear layers share on CUDA: the plans of a pass, its cache slots, and plans to warm up with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...pool.shared import OncePer
from ..ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack
from .layout import Composed, Segments

if TYPE_CHECKING:
    from ..ops.linear_layer.triton.plan import ComposePlan, SegmentPlan

# The planning module imports Triton, which CPU installations lack: it is imported when a pass needs it.


class SharedPlans(OncePer):
    """Plans and index tensors of one pass, made by the first layer that asks."""

    def segments(self, segments: Segments, device: torch.device) -> SegmentPlan:
        [plan] = self.parts(segments, device, max(1, len(segments.rows)))
        return plan

    def parts(self, segments: Segments, device: torch.device, most: int) -> list[SegmentPlan]:
        """Plans of ``most`` segment requests each, for layers that keep much of each while they run."""
        from ..ops.linear_layer.triton.plan import plan_segments

        return self(
            segments,
            ("plans", most),
            lambda: [plan_segments(rows, device) for rows in segments.rows.split(most)],
        )

    def compose(self, composed: Composed, device: torch.device) -> ComposePlan:
        from ..ops.linear_layer.triton.plan import plan_compose

        return self(composed, "plan", lambda: plan_compose(composed.rows, composed.ops, device))

    def slots(self, metadata: Any, slots: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """``slots(metadata)``: cache slots by batch row, contiguous."""
        return self(metadata, "slots", lambda: slots(metadata))


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
