"""Who holds which tiles, over all linear layers of a worker: see ``tiles.py`` for what tiles are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from .transition_blocks import NONE, LayerTiles, TilePool
from .upload import upload


class RecordTiles(Protocol):
    """The tiles of records; ``tile_of``: by layer, int32 ``[slots, heads]``, :data:`NONE` where T is zero."""

    tile_of: list[torch.Tensor]

    def offer(self, slot: int) -> None:
        """A record is about to be filled: every head of every layer gets a tile."""

    def row(self, slot: int) -> torch.Tensor:
        """The record's tiles in all layers, int32 ``[all heads]``, where the layers are."""

    def settle(self, slot: int, row: torch.Tensor | None = None) -> int:
        """A record is complete: take back the tiles of its dead heads; returns how many it keeps.

        ``row``: what :meth:`row` held when the record was complete, on the host; without it, what it holds.
        """

    def held(self, slot: int) -> list[np.ndarray]:
        """By layer, ``[heads]`` integers: the record's tiles as the host knows them, offered or settled,
        :data:`NONE` where there is none.  Never waits."""

    def fill(self, slot: int, live: Sequence[np.ndarray]) -> int:
        """The record was brought here, by layer with such live heads (``[heads]`` bool); as :meth:`settle`.

        The row says so for passes launched from now on.
        """

    def release(self, slots: Sequence[int]) -> None:
        """Records are gone."""


class HostTiles:
    """On host memory: every layer keeps its own books."""

    def __init__(self, pool: TilePool, heads: Sequence[int], slots: int) -> None:
        self._layers = [LayerTiles(pool, slots, n, torch.device("cpu")) for n in heads]
        self.tile_of = [layer.tile_of for layer in self._layers]

    def offer(self, slot: int) -> None:
        for layer in self._layers:
            layer.offer([slot])

    def row(self, slot: int) -> torch.Tensor:
        return torch.cat([tiles[slot] for tiles in self.tile_of])

    def settle(self, slot: int, row: torch.Tensor | None = None) -> int:
        return sum(layer.settle(slot) for layer in self._layers)

    def held(self, slot: int) -> list[np.ndarray]:
        return [tiles[slot].numpy() for tiles in self.tile_of]

    def fill(self, slot: int, live: Sequence[np.ndarray]) -> int:
        for row, alive in zip(self.held(slot), live, strict=True):
            row[~alive] = NONE
        return self.settle(slot)

    def release(self, slots: Sequence[int]) -> None:
        for layer in self._layers:
            for slot in slots:
                layer.release(slot)


class DeviceTiles:
    """On a device that runs behind the host: one table of all layers, written by one copy a record, and read
    back only when the caller brings what it held."""

    def __init__(self, pool: TilePool, heads: Sequence[int], slots: int, device: torch.device) -> None:
        self._pool = pool
        self._table = torch.full((slots, sum(heads)), NONE, dtype=torch.int32, device=device)
        self.tile_of = list(self._table.split(list(heads), dim=1))
        self._held: dict[int, np.ndarray] = {}
        """Rows of the table as the host knows them: offered, or settled."""

    def offer(self, slot: int) -> None:
        self.release([slot])
        self._held[slot] = np.array(self._pool.take(self._table.size(1)))
        self._write(slot, self._held[slot])

    def _write(self, slot: int, tiles: np.ndarray) -> None:
        (row,) = upload([tiles], self._table.device)
        self._table[slot].copy_(row)

    def _erase(self, slot: int) -> None:
        self._table[slot].fill_(NONE)

    def row(self, slot: int) -> torch.Tensor:
        return self._table[slot]

    def settle(self, slot: int, row: torch.Tensor | None = None) -> int:
        """Waits for the device where no ``row`` is given."""
        if slot not in self._held:
            return 0
        found = self.row(slot) if row is None else row
        return self._keep(slot, found.cpu().numpy())

    def _keep(self, slot: int, tiles: np.ndarray) -> int:
        offered, kept = _tiles_in(self._held[slot]), _tiles_in(tiles)
        self._pool.give_back(sorted(set(offered) - set(kept), reverse=True))
        self._held[slot] = tiles.copy()
        return len(kept)

    def held(self, slot: int) -> list[np.ndarray]:
        row = self._held.get(slot)
        if row is None:
            row = np.full(self._table.size(1), NONE)
        return np.split(row, np.cumsum([tiles.size(1) for tiles in self.tile_of])[:-1])

    def fill(self, slot: int, live: Sequence[np.ndarray]) -> int:
        row = np.where(np.concatenate(live), self._held[slot], NONE)
        self._write(slot, row)
        return self._keep(slot, row)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (held := self._held.pop(slot, None)) is not None:
                self._pool.give_back(_tiles_in(held))
                self._erase(slot)


def _tiles_in(row: np.ndarray) -> list[int]:
    found: list[int] = row[row != NONE].tolist()
    return found
