"""Copy small host arrays to the device, in one transfer for all arrays, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return int64 arrays of any shapes as int64 tensors on ``device``, in order.

    On the CPU, the tensors share the arrays' memory.  Elsewhere, one copy on the current stream carries all
    arrays from pinned memory.  PyTorch's allocator does not reuse that memory before the copy is over, so
    the host need not wait or keep the arrays.
    """
    arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    staged = _packed(arrays, pinned=device.type == "cuda")
    return _parts(staged.to(device, non_blocking=True), arrays)


def _packed(arrays: Sequence[np.ndarray], *, pinned: bool) -> torch.Tensor:
    """Return all elements in one tensor, one array after the other."""
    packed = torch.empty(sum(a.size for a in arrays), dtype=torch.int64, pin_memory=pinned)
    if arrays:
        np.concatenate([a.reshape(-1) for a in arrays], out=packed.numpy())
    return packed


def _parts(whole: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return views of ``whole`` with the shapes of the packed arrays."""
    parts = whole.split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def send(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the host's ``rows`` to ``device`` without a wait, as :func:`upload` does."""
    pinned = rows.contiguous().pin_memory() if device.type == "cuda" else rows
    return pinned.to(device, non_blocking=True)
