"""Attention plans for decode passes on CUDA, at fixed memory addresses, so that CUDA graphs can replay such
passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.span_attention.fixed import FixedPlans, most_columns

if TYPE_CHECKING:
    import torch

    from ...pool.decoding import Decoding
    from ...pool.step import StepContext
    from .cuda_rows import Heads


class DecodePlans:
    """The plans of fixed shapes that a worker's layers share, one per :data:`~.cuda_rows.Heads` value.

    ``most``: rows of the largest decode pass; 0 until the worker sets it.
    """

    def __init__(self) -> None:
        self.most = 0
        self._made: dict[Heads, FixedPlans] = {}

    def fit(self, decoding: Decoding) -> bool:
        """Return whether the plans have room for the rows and the public columns of a pass."""
        rows = len(decoding.requests)
        return rows <= self.most and decoding.columns <= most_columns(rows)

    def made(self, heads: Heads, device: torch.device) -> FixedPlans:
        """Return the plans for layers with these heads, allocated at the first call."""
        if heads not in self._made:
            self._made[heads] = FixedPlans(self.most, *heads, device)
        return self._made[heads]

    def written(self, step: StepContext, heads: Heads) -> FixedPlans | None:
        """Return the plans of a decode pass for layers with these heads; ``None``: the pass does not fit.

        The method writes the plans' contents only if the requests have changed since the last call.
        """
        decoding = step.decoding
        assert decoding is not None
        if not self.fit(decoding):
            return None
        plans = self.made(heads, step.device)
        if plans.written is not decoding:
            plans.write(decoding.rows, decoding.slot_mapping, decoding.kv_positions)
            plans.written = decoding
        return plans

    def write(self, step: StepContext) -> bool:
        """Write the plans of all layers before a graph is replayed; return whether the pass fits."""
        return all([self.written(step, heads) is not None for heads in self._made])
