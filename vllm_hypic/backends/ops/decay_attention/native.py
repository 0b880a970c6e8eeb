"""The layer operators in C++ (`csrc/decay_attention.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import extension, native_layer
from ..linear_layer.arguments import StateCaches
from .arguments import DecayAttentionCarry, DecayAttentionInputs, DecayAttentionRecords, Relocation

refuses = native_layer.refuses


def decay_attention_segments(
    x: DecayAttentionInputs,
    caches: StateCaches,
    out: Tensor,
    records: DecayAttentionRecords,
    rows: Tensor,
    carries: Sequence[DecayAttentionCarry],
) -> None:
    """See the package."""
    extension.kernels().decay_attention_segments(
        *_layer(x, caches, out),
        records.state,
        records.log_transition,
        rows,
        [c.log_transition for c in carries],
        [c.state for c in carries],
    )


def decay_attention_compose(
    x: DecayAttentionInputs,
    caches: StateCaches,
    out: Tensor,
    records: DecayAttentionRecords,
    rows: Tensor,
    ops: Tensor,
    relocation: Relocation | None = None,
) -> None:
    """See the package."""
    moves = (None, None, False)
    if relocation is not None:
        moves = relocation.shifts, relocation.table, relocation.neighbours
    extension.kernels().decay_attention_compose(
        *_layer(x, caches, out), records.state, records.log_transition, rows, ops, *moves
    )


def _layer(x: DecayAttentionInputs, caches: StateCaches, out: Tensor) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v, x.g, caches.slots, caches.state, out
