"""Reading small results back from the device without making the forward passes wait.

Passes are launched on the device's compute stream and run behind the host's back.  What the host wants to
know of a pass is copied on a stream of its own, and looked at when the next pass has been launched: it is
there by then, or as good as there, for the host is one pass ahead.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Readback(Protocol):
    """A tensor on its way to the host."""

    def value(self) -> torch.Tensor:
        """The tensor on the host.  Waits where it has not arrived."""


class Streams(Protocol):
    """How a worker's copies are ordered with its passes."""

    behind: bool
    """The device runs behind the host: asking for a value at once would wait for the pass."""

    def read_back(self, tensor: torch.Tensor) -> Readback:
        """Begin to copy ``tensor`` as it is after all passes launched so far; never waits.

        Later passes may overwrite it: what is copied is ordered before them.
        """


class _Here:
    """A tensor that needs no way."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def value(self) -> torch.Tensor:
        return self._tensor


class CPUStreams:
    """Everything has happened when it was called: nothing to order."""

    behind = False

    def read_back(self, tensor: torch.Tensor) -> Readback:
        return _Here(tensor.clone())


class _Copied:
    def __init__(self, host: torch.Tensor, done: torch.cuda.Event) -> None:
        self._host, self._done = host, done

    def value(self) -> torch.Tensor:
        self._done.synchronize()
        return self._host


class CUDAStreams:
    """One stream for copies beside the compute stream of the calling thread."""

    behind = True

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)

    def read_back(self, tensor: torch.Tensor) -> Readback:
        compute = torch.cuda.current_stream(tensor.device)
        # A copy of its own on the compute stream: passes may overwrite the original at once.
        kept = tensor.clone()
        self._copies.wait_stream(compute)
        host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
        with torch.cuda.stream(self._copies):
            host.copy_(kept, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copies)
        # The allocator must not hand its memory out before the copy is over.
        kept.record_stream(self._copies)
        return _Copied(host, done)


def streams_of(device: torch.device) -> Streams:
    """Those of a worker on ``device``."""
    return CUDAStreams(device) if device.type == "cuda" else CPUStreams()
