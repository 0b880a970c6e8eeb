"""Which mover of records serves a pool."""

from __future__ import annotations

from ..tensors import DevicePool
from .base import RecordMover
from .host import HostMover
from .staged import StagedMover
from .staging import BLOCK_BYTES, HOST_BLOCKS, HostBlocks
from .stream import CUDACopyStream


def mover_of(pool: DevicePool) -> RecordMover:
    """The one for the pool's device.  On CUDA it allocates its staging memory: call it once for a pool."""
    if pool.device.type == "cpu":
        return HostMover(pool)
    blocks = HostBlocks(HOST_BLOCKS, BLOCK_BYTES, pinned=True)
    return StagedMover(pool, CUDACopyStream(pool.device), blocks)
