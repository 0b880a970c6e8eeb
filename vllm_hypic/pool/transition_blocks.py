"""Transition blocks: the memory of transitions, one ``[K, K]`` matrix each, handed out to heads of records.

Most heads forget what stood before a segment of some hundred tokens: their transition is zero and takes no
memory.  How many need a block is known only when a record is complete, so a record is offered one per head
and gives back the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .upload import upload

NO_BLOCK = -1
"""Stands where a block's number would: the transition is zero."""


class TransitionBlocks:
    """The transition blocks of one worker, and which record's head in which linear layer holds which.

    ``storage [blocks, K, K]``: the matrices, which all linear layers share; ``block_of``: by layer int32
    ``[slots, heads]`` beside it, :data:`NO_BLOCK` where the transition is zero.  Layers write there that a
    head is dead; all else is written here.
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
        """``heads``: of every linear layer.  ``joint``: the layers' tables are columns of one, which one copy
        writes for a record, as it should be where the device runs behind the host; else each is contiguous,
        as the C++ kernels want them.  Default: joint unless on the CPU."""
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
        """A record's blocks ``[all heads]``, by slot, as the host knows them, offered or settled."""

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def offer(self, slot: int) -> None:
        """A record is about to be filled: every head of every layer gets a block to be written to.

        Raises ``RuntimeError`` when there are too few: the scheduler's books would be wrong.
        """
        self.release([slot])
        count = int(self._ends[-1]) if len(self._ends) else 0
        if count > self.free:
            raise RuntimeError(f"public pool: {count} transition blocks wanted, {self.free} free")
        self._held[slot] = np.array(self._free[self.free - count :], dtype=np.int64)
        del self._free[self.free - count :]
        self._write(slot, self._held[slot])

    def row(self, slot: int) -> torch.Tensor:
        """The record's blocks in all layers, int32 ``[all heads]``, where the layers are."""
        return self._tables[0][slot] if len(self._tables) == 1 else torch.cat([t[slot] for t in self._tables])

    def settle(self, slot: int, row: torch.Tensor | None = None) -> int:
        """A record is complete: take back the blocks of its dead heads; returns how many it keeps.

        ``row``: what :meth:`row` held when the record was complete, on the host; without it, what it holds,
        for which a device that runs behind is waited for.
        """
        if slot not in self._held:
            return 0
        found = self.row(slot) if row is None else row
        return self._keep(slot, found.cpu().numpy())

    def held(self, slot: int) -> list[np.ndarray]:
        """The record's blocks ``[heads]``, by layer, as the host knows them, offered or settled,
        :data:`NO_BLOCK` where there is none.  Never waits."""
        return self._by_layer(self._held.get(slot, np.full(sum(t.size(1) for t in self._tables), NO_BLOCK)))

    def fill(self, slot: int, live: Sequence[np.ndarray]) -> int:
        """The record was brought here, by layer with such live heads (``[heads]`` bool); as :meth:`settle`.

        The tables say so for passes launched from now on.
        """
        row = np.where(np.concatenate([np.zeros(0, bool), *live]), self._held[slot], NO_BLOCK)
        self._write(slot, row)
        return self._keep(slot, row)

    def release(self, slots: Sequence[int]) -> None:
        """The records in ``slots`` are gone."""
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
