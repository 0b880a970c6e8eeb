"""A stream of copies beside the passes of a device, which may run behind the host.

Passes are launched on the device's compute stream and run behind the host's back.  What leaves or enters
their tensors is copied on a stream of its own.  What the host wants to know of a pass is looked at when the
next pass has been launched: it is there by then, or as good as there, for the host is one pass ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the stream of copies."""

    def done(self) -> bool:
        """Whether all copies before it have happened.  Never waits."""

    def wait(self) -> None:
        """Wait until they have."""


class Readback(Protocol):
    """A tensor on its way to the host."""

    def value(self) -> torch.Tensor:
        """The tensor on the host.  Waits where it has not arrived."""


class SideStream(Protocol):
    """Copies happen one after the other, each after all passes that were launched before it.

    Called by the thread that launches the passes only.
    """

    behind: bool
    """The device runs behind the host: asking for a value at once would wait for the pass."""

    def launch(self, work: Callable[[], None]) -> Mark:
        """Have ``work``'s operators run on this stream, after all passes launched so far and all copies
        launched before; returns the mark behind them.  ``work`` itself may run at once.  Never waits."""

    def before_passes(self, mark: Mark) -> None:
        """Passes launched from now on begin after ``mark``; the host does not wait."""

    def read_back(self, tensor: torch.Tensor) -> Readback:
        """Begin to copy ``tensor`` as it is after all passes launched so far; never waits.

        Later passes may overwrite it: what is copied is ordered before them.
        """


class _Passed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CPUSideStream:
    """Everything has happened when it was called: nothing to order."""

    behind = False

    def launch(self, work: Callable[[], None]) -> Mark:
        work()
        return _Passed()

    def before_passes(self, mark: Mark) -> None:
        return None

    def read_back(self, tensor: torch.Tensor) -> Readback:
        return _Copied(tensor.clone(), _Passed())


@dataclass(frozen=True)
class _Copied:
    host: torch.Tensor
    mark: Mark

    def value(self) -> torch.Tensor:
        self.mark.wait()
        return self.host


@dataclass(frozen=True)
class _EventMark:
    event: torch.cuda.Event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CUDASideStream:
    """One CUDA stream.  Tensors that outlive a copy belong to the caller; what ``work`` allocates is this
    stream's own, so PyTorch's allocator reuses it in the stream's order."""

    behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def launch(self, work: Callable[[], None]) -> Mark:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.inference_mode():
            work()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _EventMark(event)

    def before_passes(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def read_back(self, tensor: torch.Tensor) -> Readback:
        # A copy of its own on the compute stream: passes may overwrite the original at once.
        kept = tensor.clone()
        host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
        mark = self.launch(lambda: host.copy_(kept, non_blocking=True) and None)
        # The allocator must not hand its memory out before the copy is over.
        kept.record_stream(self._stream)
        return _Copied(host, mark)


def side_stream_of(device: torch.device) -> SideStream:
    """A new one for the copies of a worker on ``device``."""
    return CUDASideStream(device) if device.type == "cuda" else CPUSideStream()
