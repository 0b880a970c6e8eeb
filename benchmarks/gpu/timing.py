"""Times of calls on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..lib.stats import Spread

FLUSH_BYTES = 512 << 20
"""Written between calls: many times the last-level cache, so that every call finds its inputs in memory. It
also keeps the device busy while the host prepares the call, whose launches are then not part of its time."""


@dataclass
class Timer:
    """Takes ``repeats`` times of calls, after ``warmup`` that are not counted.

    On a GPU a time is what passes on the device between two events, in a stream that was busy when the call
    began: launches that the host prepares in time cost nothing. With ``wall``, and elsewhere, it is the
    host's time from an idle device to an idle device.
    """

    device: torch.device
    repeats: int
    warmup: int = 3
    wall: bool = False
    _scratch: torch.Tensor | None = field(default=None, repr=False)

    def measure(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, Spread]:
        """Seconds of each call. They take turns and every one comes first once in a while, so that ratios
        of one repeat are fair."""
        for call in calls.values():
            for _ in range(self.warmup):
                call()
        names = list(calls)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        once = self._on_device if self.device.type == "cuda" and not self.wall else self._on_host
        for repeat in range(self.repeats):
            turn = repeat % max(len(names), 1)
            order = names[turn:] + names[:turn]
            for name, value in zip(order, once([calls[name] for name in order]), strict=True):
                seconds[name].append(value)
        return {name: Spread.of(values) for name, values in seconds.items()}

    def fastest(self, calls: Mapping[str, Callable[[], object]]) -> str:
        """Name of the call with the smallest median of a few repeats."""
        few = Timer(self.device, min(5, self.repeats), self.warmup, self.wall, self._scratch)
        medians = {name: spread.median for name, spread in few.measure(calls).items()}
        return min(medians, key=lambda name: medians[name])

    def _on_device(self, calls: list[Callable[[], object]]) -> list[float]:
        if self._scratch is None:
            self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        events = []
        for call in calls:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._scratch.zero_()
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1e3 for start, stop in events]

    def _on_host(self, calls: list[Callable[[], object]]) -> list[float]:
        seconds = []
        for call in calls:
            self._wait()
            began = time.perf_counter()
            call()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The device's part of ``call``, recorded in a CUDA graph: its time holds no launches by the host.

    ``call`` may not wait for the device. Raises what CUDA raises when it cannot be recorded.
    """
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, not {device}")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # Kernels are compiled and tuned, and memory is taken, outside of the recording.
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
