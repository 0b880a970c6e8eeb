"""Worker side of the public pool: the tensors, allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .geometry import STATE_DTYPE, TRANSITION_DTYPE, LinearGeometry, PoolGeometry
from .record_blocks import DeviceTiles, HostTiles, RecordTiles
from .transition_blocks import TilePool


@dataclass(frozen=True)
class PublicKV:
    """Unrotated K and V of one full-attention layer, each ``[pages * page_tokens, kv_heads, head_size]``."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LinearRecords:
    """Records of one linear layer: ``state [slots, H, K, V]`` fp32 and ``conv_tail [slots, conv_rows,
    conv_dim]`` by slot; transitions in ``tiles [tiles, K, K]`` fp16, which all layers share: ``tile_of
    [slots, H]`` int32 names that of a head, -1: the transition is zero."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    tiles: torch.Tensor
    tile_of: torch.Tensor

    @staticmethod
    def allocate(
        g: LinearGeometry, slots: int, tiles: torch.Tensor, tile_of: torch.Tensor, device: torch.device
    ) -> LinearRecords:
        return LinearRecords(
            torch.zeros(slots, g.heads, g.key_dim, g.value_dim, dtype=STATE_DTYPE, device=device),
            torch.zeros(slots, g.conv_rows, g.conv_dim, dtype=g.conv_dtype, device=device),
            tiles,
            tile_of,
        )

    def transition(self, slot: int) -> torch.Tensor:
        """T ``[H, K, K]`` of a record, dead heads included."""
        tiles = self.tile_of[slot].long()
        return self.tiles[tiles.clamp(min=0)].masked_fill((tiles < 0)[:, None, None], 0.0)


class DevicePool:
    """All public records of one worker.  Its memory is touched at once, as vLLM does with its own: else the
    first records in it would pay for its pages."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        rows, slots = geometry.pages * geometry.page_tokens, geometry.slots
        self.kv: dict[str, PublicKV] = {}
        for a in geometry.attention:
            shape = (rows, a.kv_heads, a.head_size)
            self.kv[a.layer] = PublicKV(
                torch.zeros(shape, dtype=a.dtype, device=device),
                torch.zeros(shape, dtype=a.dtype, device=device),
            )
        self.linear: dict[str, LinearRecords] = {}
        self.record_tiles: RecordTiles | None = None
        """``None`` without linear layers."""
        if geometry.linear:
            key_dim = geometry.linear[0].key_dim  # of all: see pool_geometry
            tiles = TilePool(geometry.tiles, key_dim, TRANSITION_DTYPE, device)
            heads = [g.heads for g in geometry.linear]
            books: RecordTiles
            if device.type == "cpu":
                books = HostTiles(tiles, heads, slots)
            else:
                books = DeviceTiles(tiles, heads, slots, device)
            self.record_tiles = books
            for g, tile_of in zip(geometry.linear, books.tile_of, strict=True):
                self.linear[g.layer] = LinearRecords.allocate(g, slots, tiles.storage, tile_of, device)

    def offer_tiles(self, slot: int) -> None:
        """A record is about to be filled: every head of every layer gets a tile."""
        if self.record_tiles is not None:
            self.record_tiles.offer(slot)

    def settle_tiles(self, slot: int, row: torch.Tensor | None = None) -> int:
        """A record is complete: take back the tiles of its dead heads; returns how many it keeps.

        ``row``: see :meth:`RecordTiles.settle`.
        """
        return 0 if self.record_tiles is None else self.record_tiles.settle(slot, row)

    def held_tiles(self, slot: int) -> list[np.ndarray]:
        """See :meth:`RecordTiles.held`."""
        return [] if self.record_tiles is None else self.record_tiles.held(slot)

    def fill_tiles(self, slot: int, live: Sequence[np.ndarray]) -> int:
        """See :meth:`RecordTiles.fill`."""
        return 0 if self.record_tiles is None else self.record_tiles.fill(slot, live)

    def release_tiles(self, slots: list[int]) -> None:
        """Records are gone."""
        if self.record_tiles is not None:
            self.record_tiles.release(slots)
