"""Worker side of the public pool: the tensors, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .geometry import STATE_DTYPE, TRANSITION_DTYPE, LinearGeometry, PoolGeometry
from .tiles import LayerTiles, TilePool


@dataclass(frozen=True)
class PublicKV:
    """Unrotated K and V of one full-attention layer, each ``[pages * page_tokens, kv_heads, head_size]``."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LinearRecords:
    """Records of one linear layer: ``state [slots, H, K, V]`` fp32 and ``conv_tail [slots, conv_rows,
    conv_dim]`` by slot, transitions in tiles."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    held: LayerTiles

    @staticmethod
    def allocate(g: LinearGeometry, slots: int, tiles: TilePool, device: torch.device) -> LinearRecords:
        return LinearRecords(
            torch.empty(slots, g.heads, g.key_dim, g.value_dim, dtype=STATE_DTYPE, device=device),
            torch.empty(slots, g.conv_rows, g.conv_dim, dtype=g.conv_dtype, device=device),
            LayerTiles(tiles, slots, g.heads, device),
        )

    @property
    def tiles(self) -> torch.Tensor:
        """``[tiles, K, K]`` fp16."""
        return self.held.pool.storage

    @property
    def tile_of(self) -> torch.Tensor:
        """``[slots, H]`` int32: the tile of a head's transition; -1: the transition is zero."""
        return self.held.tile_of

    def transition(self, slot: int) -> torch.Tensor:
        """T ``[H, K, K]`` of a record, dead heads included."""
        tiles = self.tile_of[slot].long()
        return self.tiles[tiles.clamp(min=0)].masked_fill((tiles < 0)[:, None, None], 0.0)


class DevicePool:
    """All public records of one worker.  Memory is uninitialised until a segment is captured."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        self.geometry = geometry
        rows, slots = geometry.pages * geometry.page_tokens, geometry.slots
        self.kv: dict[str, PublicKV] = {}
        for a in geometry.attention:
            shape = (rows, a.kv_heads, a.head_size)
            self.kv[a.layer] = PublicKV(
                torch.empty(shape, dtype=a.dtype, device=device),
                torch.empty(shape, dtype=a.dtype, device=device),
            )
        self.linear: dict[str, LinearRecords] = {}
        if geometry.linear:
            key_dim = geometry.linear[0].key_dim  # of all: see pool_geometry
            tiles = TilePool(geometry.tiles, key_dim, TRANSITION_DTYPE, device)
            for g in geometry.linear:
                self.linear[g.layer] = LinearRecords.allocate(g, slots, tiles, device)

    def offer_tiles(self, slot: int) -> None:
        """A record is about to be filled: every head of every layer gets a tile."""
        for records in self.linear.values():
            records.held.offer([slot])

    def settle_tiles(self, slot: int) -> int:
        """A record is complete: take back the tiles of its dead heads; returns how many it keeps."""
        return sum(records.held.settle(slot) for records in self.linear.values())

    def release_tiles(self, slots: list[int]) -> None:
        """Records are gone."""
        for records in self.linear.values():
            for slot in slots:
                records.held.release(slot)
