"""Allocate the pool's memory on hosts, in large pages where the kernel has them.

Decode reads every record of a request once a layer.  With pages of 4 KB, page-table walks take a tenth of the
time of attention over 8k columns, and more in virtual machines.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

LARGE = 2 << 20
"""Bytes of a large page on x86-64."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros, like :func:`torch.zeros`, and touch its memory at once."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < LARGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape).zero_()
