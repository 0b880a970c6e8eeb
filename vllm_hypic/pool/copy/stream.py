"""A stream of copies beside the passes of a device that runs behind the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the stream of copies."""

    def done(self) -> bool:
        """Whether all copies before it have happened.  Never waits."""

    def wait(self) -> None:
        """Wait until they have."""


class CopyStream(Protocol):
    """Copies happen one after the other, each after all passes that were launched before it.

    Called by the thread that launches the passes only.
    """

    def launch(self, work: Callable[[], None]) -> Mark:
        """Have ``work``'s operators run on this stream, after all passes launched so far and all copies
        launched before; returns the mark behind them.  ``work`` itself may run at once.  Never waits."""

    def before_passes(self, mark: Mark) -> None:
        """Passes launched from now on begin after ``mark``; the host does not wait."""


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CUDACopyStream:
    """One CUDA stream.  Tensors that outlive a copy belong to the caller; what ``work`` allocates is this
    stream's own, so PyTorch's allocator reuses it in the stream's order."""

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
