"""Small host arrays to the device: one transfer for all of them, and none that waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Int64 arrays of any shapes as int64 tensors on ``device``, in order.

    On the CPU the tensors share the arrays' memory.  Elsewhere all arrays travel in one copy on the current
    stream, from pinned memory that PyTorch's allocator does not hand out again before the copy is over, so
    the host neither waits nor has to keep anything.
    """
    arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    staged = _packed(arrays, pinned=device.type == "cuda")
    return _parts(staged.to(device, non_blocking=True), arrays)


def _packed(arrays: Sequence[np.ndarray], *, pinned: bool) -> torch.Tensor:
    """All elements, one array after the other."""
    packed = torch.empty(sum(a.size for a in arrays), dtype=torch.int64, pin_memory=pinned)
    if arrays:
        np.concatenate([a.reshape(-1) for a in arrays], out=packed.numpy())
    return packed


def _parts(whole: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Views of ``whole``, shaped like the arrays that were packed."""
    parts = whole.split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def send(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``rows`` of the host on ``device``, by a copy that nobody waits for, as those of :func:`upload`."""
    pinned = rows.contiguous().pin_memory() if device.type == "cuda" else rows
    return pinned.to(device, non_blocking=True)
