"""A stream of copies beside the passes of a device, which may run behind the host.

The host launches passes on the device's compute stream and does not wait for them.  Copies into and out of
their tensors run on a separate stream.  The host reads a pass's results after it has launched the next pass.
By then the results have arrived, or nearly so, because the host is a pass ahead.
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
        """Wait until all copies before it have happened."""


class Readback(Protocol):
    """A tensor on its way to the host."""

    def value(self) -> torch.Tensor:
        """Return the tensor on the host.  Waits if the tensor has not arrived."""


class SideStream(Protocol):
    """A stream that runs copies one after the other, each after all passes launched before the copy.

    Only the thread that launches the passes may call it.
    """

    behind: bool
    """Whether the device runs behind the host, so that a read of a value would wait for the pass."""

    def launch(self, work: Callable[[], None]) -> Mark:
        """Launch ``work``'s operators on this stream, after all passes and copies launched so far.

        Returns the mark behind the operators.  ``work`` itself may run at once.  Never waits."""

    def before_passes(self, mark: Mark) -> None:
        """Make passes launched from now on begin after ``mark``.  The host does not wait."""

    def read_back(self, tensor: torch.Tensor) -> Readback:
        """Begin to copy ``tensor`` as it is after all passes launched so far.  Never waits.

        Later passes may overwrite ``tensor``, as the copy precedes them.
        """


class _Passed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CPUSideStream:
    """A stream that runs each copy at once, so that no order is needed."""

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
    """A CUDA stream for copies.  Tensors that outlive a copy belong to the caller.  Memory that ``work``
    allocates belongs to this stream, so PyTorch's allocator reuses it in the stream's order."""

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
        # The compute stream clones the tensor first, because passes may overwrite the original at once.
        kept = tensor.clone()
        host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
        mark = self.launch(lambda: host.copy_(kept, non_blocking=True) and None)
        # The allocator must not reuse the clone's memory before the copy is over.
        kept.record_stream(self._stream)
        return _Copied(host, mark)


def side_stream_of(device: torch.device) -> SideStream:
    """Return a new stream for the copies of a worker on ``device``."""
    return CUDASideStream(device) if device.type == "cuda" else CPUSideStream()
