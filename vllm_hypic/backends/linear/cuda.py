"""Values that linear layers share on CUDA: the plans of a pass, its cache slots, and plans for warm-up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...pool.shared import OncePer
from ..ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack
from .layout import Composed, Segments

if TYPE_CHECKING:
    from ..ops.linear_layer.triton.plan import ComposePlan, SegmentPlan

# The planning module imports Triton, which CPU installations lack: functions below import it on demand.


@dataclass(frozen=True)
class AtOnce:
    """The limits on the requests of a pass that a layer runs at once; later turns run the rest.

    ``requests``: most requests of a turn; ``unfilled``: most rows that the last chunks of a turn's stretches
    lack.  A turn has at least one request."""

    requests: int = sys.maxsize
    unfilled: int = sys.maxsize

    def turns(self, unfilled: Sequence[int]) -> Iterator[slice]:
        """Yield the requests of each turn; ``unfilled``: rows that the last chunks of each request lack."""
        first, lacking = 0, 0
        for i, rows in enumerate(unfilled):
            if i > first and (i - first == self.requests or lacking + rows > self.unfilled):
                yield slice(first, i)
                first, lacking = i, 0
            lacking += rows
        yield slice(first, len(unfilled))


EVERYTHING = AtOnce()


class SharedPlans(OncePer):
    """Plans and index tensors of one pass, made by the first layer that requests them."""

    def segments(self, segments: Segments, device: torch.device) -> SegmentPlan:
        [plan] = self.segment_parts(segments, device, EVERYTHING)
        return plan

    def segment_parts(self, segments: Segments, device: torch.device, most: AtOnce) -> list[SegmentPlan]:
        """Return a plan per turn, for layers whose operators take much memory per segment request."""
        from ..ops.linear_layer.triton.plan import plan_segments, unfilled_segments

        rows = segments.rows
        return self(
            segments,
            most,
            lambda: [plan_segments(rows[turn], device) for turn in most.turns(unfilled_segments(rows))],
        )

    def compose(self, composed: Composed, device: torch.device) -> ComposePlan:
        [plan] = self.compose_parts(composed, device, EVERYTHING)
        return plan

    def compose_parts(self, composed: Composed, device: torch.device, most: AtOnce) -> list[ComposePlan]:
        """Return a plan per turn, for layers whose operators take much memory per composed request."""
        from ..ops.linear_layer.triton.plan import plan_compose, unfilled_composed

        rows, ops = composed.rows, composed.ops
        return self(
            composed,
            most,
            lambda: [
                plan_compose(rows[turn], ops, device) for turn in most.turns(unfilled_composed(rows, ops))
            ],
        )

    def slots(self, metadata: Any, slots: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return ``slots(metadata)``, made once: cache slots by batch row, contiguous."""
        return self(metadata, "slots", lambda: slots(metadata))


def warm_up_plans(device: torch.device) -> Iterator[tuple[int, SegmentPlan, ComposePlan]]:
    """Yield, for every chunk length, a number of token rows and plans over these rows.

    The plans compile every kernel that a pass runs, and use batch row 0 and record slot 0 alone."""
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
