"""What attention layers on CUDA read in passes that decode: in memory that stays where it is, so that such
passes can be CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.span_attention.fixed import FixedPlans, most_columns

if TYPE_CHECKING:
    import torch

    from ...pool.decoding import Decoding
    from ...pool.step import StepContext
    from .cuda_rows import Heads


class DecodePlans:
    """Plans of fixed shapes of a worker's layers, one for each kind of heads.

    ``most``: rows of the largest pass that decodes, 0 until the worker says so.
    """

    def __init__(self) -> None:
        self.most = 0
        self._made: dict[Heads, FixedPlans] = {}

    def fit(self, decoding: Decoding) -> bool:
        """Whether there is room for a pass: rows, and public columns in so many rows."""
        rows = len(decoding.requests)
        return rows <= self.most and decoding.columns <= most_columns(rows)

    def made(self, heads: Heads, device: torch.device) -> FixedPlans:
        """Plans for layers with such heads."""
        if heads not in self._made:
            self._made[heads] = FixedPlans(self.most, *heads, device)
        return self._made[heads]

    def written(self, step: StepContext, heads: Heads) -> FixedPlans | None:
        """Plans of the pass, which decodes, for layers with such heads; ``None``: there is no room for it.

        Contents are written when the requests have changed, else nothing is done.
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
        """The same for all layers, before a graph is replayed; whether there is room for the pass."""
        return all([self.written(step, heads) is not None for heads in self._made])
