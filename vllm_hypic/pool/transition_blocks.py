"""Tiles: the memory of transitions, one ``[K, K]`` matrix each, handed out to single heads of records.

Most heads forget what stood before a segment of some hundred tokens: their transition is zero and takes no
memory. How many need a tile is known only when a record is complete, so a record is offered one per head and
gives back the rest.
"""

from __future__ import annotations

import torch

NONE = -1
"""In place of a tile: the transition is zero."""


class TilePool:
    """``storage [tiles, K, K]`` fp16, shared by the linear layers of one worker."""

    def __init__(self, tiles: int, key_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.zeros(tiles, key_dim, key_dim, dtype=dtype, device=device)
        self._free = list(range(tiles - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Raises ``RuntimeError`` when there are too few: the scheduler's books would be wrong."""
        if count > len(self._free):
            raise RuntimeError(f"public pool: {count} tiles wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, tiles: list[int]) -> None:
        self._free.extend(tiles)


class LayerTiles:
    """Which tiles the records of one linear layer hold: ``tile_of [slots, heads]`` int32, :data:`NONE` where
    the transition is zero."""

    def __init__(self, pool: TilePool, slots: int, heads: int, device: torch.device) -> None:
        self.pool = pool
        self.tile_of = torch.full((slots, heads), NONE, dtype=torch.int32, device=device)
        self._held: dict[int, list[int]] = {}

    def offer(self, slots: list[int]) -> None:
        """Give all heads of the records in ``slots`` a tile to be written to."""
        heads = self.tile_of.size(1)
        for slot in slots:
            self.release(slot)
            self._held[slot] = self.pool.take(heads)
        rows = [self._held[slot] for slot in slots]
        self.tile_of[slots] = torch.tensor(rows, dtype=torch.int32, device=self.tile_of.device)

    def settle(self, slot: int) -> int:
        """Take back the tiles of heads that turned out dead (:data:`NONE` in ``tile_of``); how many stay."""
        offered = self._held.get(slot)
        if offered is None:
            return 0
        kept = [tile for tile in self.tile_of[slot].tolist() if tile != NONE]
        self.pool.give_back(sorted(set(offered) - set(kept), reverse=True))
        self._held[slot] = kept
        return len(kept)

    def release(self, slot: int) -> None:
        """The record in ``slot`` is gone."""
        held = self._held.pop(slot, None)
        if held is not None:
            self.pool.give_back(held)
            self.tile_of[slot] = NONE
