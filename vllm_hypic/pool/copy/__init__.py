"""Copies of records between a pool and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tensors import DevicePool
    from .base import RecordMover


def mover_of(pool: DevicePool) -> RecordMover:
    """Return a new mover for the pool's device.  On CUDA it allocates staging memory: call once per pool."""
    from .host import HostMover
    from .staged import StagedMover
    from .staging import BLOCK_BYTES, HOST_BLOCKS, HostBlocks
    from .stream import CUDASideStream

    if pool.device.type == "cpu":
        return HostMover(pool)
    blocks = HostBlocks(HOST_BLOCKS, BLOCK_BYTES, pinned=True)
    return StagedMover(pool, CUDASideStream(pool.device), blocks)
