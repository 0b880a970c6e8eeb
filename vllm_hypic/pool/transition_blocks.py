"""Transition blocks: the memory of transitions, one ``[K, K]`` matrix each, handed out to heads of records.

Most heads forget the text before a segment of some hundred tokens: their transition is zero and takes no
memory.  The number of heads that need a block is known only when a record is complete.  The pool therefore
offers a record one block per head, and takes back the blocks of dead heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .upload import upload

NO_BLOCK = -1
"""Placeholder for a block's number where the transition is zero."""


class TransitionBlocks:
    """The transition blocks of one worker, and the block of each record's heads in each linear layer.

    ``storage [blocks, K, K]``: the matrices, which all linear layers share; ``block_of``: int32 ``[slots,
    heads]`` for each layer, on the same device, :data:`NO_BLOCK` where the transition is zero.  Layers write
    only that a head is dead into these tables; this class writes all other values.
    """

    def __init__(
        self,
        blocks: int,
        key_dim: int,
        heads: Sequence[int],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        joint: bool | None = None,
    ) -> None:
        """Allocate ``blocks`` blocks, and tables for ``slots`` slots.

        ``heads``: number of heads of each linear layer.  ``joint``: the layers' tables are columns of one
        table, so that one copy writes a record's blocks, which suits devices that run behind the host.
        Otherwise each table is contiguous, as the C++ kernels need.  Default: joint unless on the CPU."""
        self.storage = torch.zeros(blocks, key_dim, key_dim, dtype=dtype, device=device)
        if device.type != "cpu" or not heads if joint is None else joint:
            table = torch.full((slots, sum(heads)), NO_BLOCK, dtype=torch.int32, device=device)
            self._tables, self.block_of = [table], list(table.split(list(heads), dim=1))
        else:
            self._tables = [torch.full((slots, n), NO_BLOCK, dtype=torch.int32, device=device) for n in heads]
            self.block_of = self._tables
        self._ends = np.cumsum(heads, dtype=np.int64)
        self._free = list(range(blocks - 1, -1, -1))
        self._held: dict[int, np.ndarray] = {}
        """Records' blocks ``[all heads]``, offered or settled, by slot: the host's copy of the tables."""

    @property
    def free(self) -> int:
        """Number of blocks that no record holds."""
        return len(self._free)

    def offer(self, slot: int) -> None:
        """Give every head of every layer a block in ``slot``, whose record is about to be filled.

        Raises ``RuntimeError`` for too few free blocks, which means that the scheduler's books are wrong.
        """
        self.release([slot])
        count = int(self._ends[-1]) if len(self._ends) else 0
        if count > self.free:
            raise RuntimeError(f"public pool: {count} transition blocks wanted, {self.free} free")
        self._held[slot] = np.array(self._free[self.free - count :], dtype=np.int64)
        del self._free[self.free - count :]
        self._write(slot, self._held[slot])

    def row(self, slot: int) -> torch.Tensor:
        """Return the record's blocks in all layers, int32 ``[all heads]``, on the layers' device."""
        return self._tables[0][slot] if len(self._tables) == 1 else torch.cat([t[slot] for t in self._tables])

    def settle(self, slot: int, row: torch.Tensor | None = None) -> int:
        """Take back the blocks of a complete record's dead heads; return the number of blocks it keeps.

        ``row``: result of :meth:`row` when the record was complete, on the host.  Without ``row``, the method
        reads the tables, and waits for a device that runs behind.
        """
        if slot not in self._held:
            return 0
        found = self.row(slot) if row is None else row
        return self._keep(slot, found.cpu().numpy())

    def held(self, slot: int) -> list[np.ndarray]:
        """Return the record's blocks ``[heads]``, by layer, offered or settled, from the host's copy.

        Heads without a block have :data:`NO_BLOCK`.  Never waits."""
        return self._by_layer(self._held.get(slot, np.full(sum(t.size(1) for t in self._tables), NO_BLOCK)))

    def fill(self, slot: int, live: Sequence[np.ndarray]) -> int:
        """Settle a record that was copied into the pool, as :meth:`settle` does.

        ``live``: live heads by layer, ``[heads]`` bool.  Passes launched from now on find them in the tables.
        """
        row = np.where(np.concatenate([np.zeros(0, bool), *live]), self._held[slot], NO_BLOCK)
        self._write(slot, row)
        return self._keep(slot, row)

    def release(self, slots: Sequence[int]) -> None:
        """Take back all blocks of the records in ``slots``, which are gone."""
        for slot in slots:
            if (held := self._held.pop(slot, None)) is not None:
                self._free.extend(_blocks_in(held))
                self._erase(slot)

    def _keep(self, slot: int, row: np.ndarray) -> int:
        offered, kept = _blocks_in(self._held[slot]), _blocks_in(row)
        self._free.extend(sorted(set(offered) - set(kept), reverse=True))
        self._held[slot] = row.copy()
        return len(kept)

    def _by_layer(self, row: np.ndarray) -> list[np.ndarray]:
        return np.split(row, self._ends[:-1]) if len(self._ends) else []

    def _write(self, slot: int, row: np.ndarray) -> None:
        parts = [row] if len(self._tables) == 1 else self._by_layer(row)
        for table, part in zip(self._tables, parts, strict=True):
            (given,) = upload([part], table.device)
            table[slot].copy_(given)

    def _erase(self, slot: int) -> None:
        for table in self._tables:
            table[slot].fill_(NO_BLOCK)


def _blocks_in(row: np.ndarray) -> list[int]:
    found: list[int] = row[row != NO_BLOCK].tolist()
    return found
