"""Plans of decode passes in buffers of fixed shapes, for launches that vLLM records once and replays.

Each request has one row of the query: row ``i`` of a pass is request ``i`` of its batch.  Some rows see
public columns.  A plan for up to ``R`` rows always launches the same programs over the same memory: the
programs read their work from the buffers.  Surplus programs find an item without rows and end.

Tiles and parts are those of :mod:`.plan`: a request's result does not depend on the kind of plan that holds
the request's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .plan import (
    FEW_ROWS,
    ITEM_FIELDS,
    MERGE_FIELDS,
    SpanColumns,
    SpanPlan,
    SpanWork,
    divide,
    many_rows,
    part_columns,
)

LEAST_COLUMNS = 1 << 16
COLUMNS_A_ROW = 1 << 12
"""A pass of ``R`` rows has room for ``R`` times this many public columns, and for at least
:data:`LEAST_COLUMNS`; requests may share the room in any way."""

NO_ROW = -1
"""Stands for no token row: merges skip it."""


def most_columns(rows: int) -> int:
    """Return the most public columns that a pass of ``rows`` requests may see, together."""
    return max(LEAST_COLUMNS, rows * COLUMNS_A_ROW)


@dataclass
class FixedPlans:
    """Plans of passes of up to ``most`` rows, for layers with such heads; the plans share the buffers.

    ``written``: identifies the buffers' contents to callers; ``None``: no contents.
    """

    most: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    written: object = None
    _plans: dict[int, SpanPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group = self.heads // self.kv_heads
        few = self.group <= FEW_ROWS
        self.block = FEW_ROWS if few else many_rows(self.head_size, self.dtype, self.device)
        self.part = part_columns(self.kv_heads, self.block)
        most, items = self.most, self._items(self.most)
        sizes = [most, most, items * ITEM_FIELDS, self._tiles(most) * MERGE_FIELDS]
        # Whole lines of 64 bytes: Triton specialises launches on alignment.
        self._at = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        self._sizes = sizes
        self._packed = torch.zeros(self._at[-1], dtype=torch.int32, device=self.device)
        self._columns = torch.zeros(2, most_columns(most), dtype=torch.int32, device=self.device)
        self._write(*self._empty())

    def plan(self, rows: int) -> SpanPlan:
        """Return the plan of a pass of ``rows`` rows, at most :attr:`most`; its tensors never change."""
        if rows not in self._plans:
            token_rows, visible, items, merges = (
                self._packed[at : at + size] for at, size in zip(self._at[:-1], self._sizes, strict=True)
            )
            work = SpanWork(
                self.block,
                items.view(-1, ITEM_FIELDS)[: self._items(rows)],
                merges.view(-1, MERGE_FIELDS)[: self._tiles(rows)],
                self._items(rows) * min(self.group, self.block),
            )
            columns = SpanColumns(self._columns[0], self._columns[1], (), ())
            self._plans[rows] = SpanPlan(
                *(self.heads, self.kv_heads, self.head_size, self.dtype.itemsize, columns),
                *(token_rows[:rows], visible[:rows], None, (work,)),
            )
        return self._plans[rows]

    def write(
        self,
        rows: np.ndarray,
        slot_mapping: Sequence[torch.Tensor],
        kv_positions: Sequence[torch.Tensor],
    ) -> None:
        """Write public columns into the buffers of all plans.  ``rows [requests]``: rows of the pass,
        ascending; ``slot_mapping`` and ``kv_positions``: each request's columns, int64 on the device.

        Makes one upload and two copies on the device, and waits for none.  The number of columns must not
        exceed :func:`most_columns` of the pass's rows.
        """
        if not len(rows):
            return self._write(*self._empty())
        counts = np.array([len(s) for s in slot_mapping], dtype=np.int64)
        total, count = int(counts.sum()), int(rows[-1]) + 1
        self._columns[0, :total].copy_(torch.cat(list(slot_mapping)))
        self._columns[1, :total].copy_(torch.cat(list(kv_positions)))
        token_rows, visible, items, merges = self._empty()
        token_rows[rows], visible[rows] = rows, counts
        starts = np.zeros(count, dtype=np.int64)
        starts[rows] = np.cumsum(counts) - counts
        each = np.arange(count)
        divided = divide(
            np.stack([each, each + 1], 1),
            np.ones_like(each),
            starts,
            np.zeros_like(each),
            visible[:count],
            self.group,
            self.block,
            self.part,
            np.ones(count, dtype=bool),
        )
        work = divided.items[divided.items[:, 5] < divided.items[:, 6]]
        items[: len(work)], merges[: len(divided.merges)] = work, divided.merges
        return self._write(token_rows, visible, items, merges)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return self._packed.nbytes + self._columns.nbytes

    def result_bytes(self, rows: int) -> int:
        """Return the bytes that a layer allocates in a pass of ``rows`` rows: results and partial results
        with their log-sum-exp, and a query in the model's dtype if the query has another dtype."""
        partial = self._items(rows) * min(self.group, self.block)
        results = (rows * self.heads + partial * self.kv_heads) * (self.head_size + 1)
        return results * torch.float32.itemsize + rows * self.heads * self.head_size * self.dtype.itemsize

    def _empty(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return token rows, visible columns, items and tiles to merge of a pass that sees no column."""
        most = self.most
        items = np.zeros((self._items(most), ITEM_FIELDS), dtype=np.int64)
        items[:, 7] = -1
        merges = np.zeros((self._tiles(most), MERGE_FIELDS), dtype=np.int64)
        return np.full(most, NO_ROW), np.zeros(most, dtype=np.int64), items, merges

    def _write(self, *arrays: np.ndarray) -> None:
        """Write all buffers by one copy, without waiting for the copy."""
        packed = torch.zeros(self._at[-1], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for at, array in zip(self._at, arrays, strict=False):
            packed.numpy()[at : at + array.size] = array.ravel()
        self._packed.copy_(packed, non_blocking=True)

    def _tiles(self, rows: int) -> int:
        return rows * -(-self.group // self.block)

    def _items(self, rows: int) -> int:
        """Return the number of parts of all tiles: whole parts, and per tile a perhaps shorter last part."""
        return self._tiles(rows) + most_columns(rows) // self.part * -(-self.group // self.block)
