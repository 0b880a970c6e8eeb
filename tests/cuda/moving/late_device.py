"""A device that runs behind the host, without one: passes and copies are queued and happen when the test says
so, each queue in its order, ahead of each other as far as marks allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_hypic.pool.copy.staging import Block, HostBlocks
from vllm_hypic.pool.copy.stream import Mark
from vllm_hypic.pool.transition_blocks import TransitionBlocks

CPU = torch.device("cpu")
POISON = 0xA5


class LateMark:
    def __init__(self, device: LateDevice) -> None:
        self._device, self.passed = device, False

    def done(self) -> bool:
        self._device.called()
        return self.passed

    def wait(self) -> None:
        self._device.called()
        while not self.passed:
            self._device.run(1)


class _NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a thread calls {func}")


_Work = Callable[[], None]


class LateDevice:
    """Two streams.  Also the :class:`SideStream` of a worker on it."""

    behind = True

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.passes: deque[_Work | LateMark] = deque()
        self.copies: deque[_Work | LateMark] = deque()
        self._off_limits = False

    def run(self, steps: int) -> None:
        """So many things happen, on either stream, if as many are left."""
        for _ in range(steps):
            streams = self.passes, self.copies
            ready = [s for s in streams if s and not (isinstance(s[0], LateMark) and not s[0].passed)]
            if not ready:
                assert not self.passes and not self.copies, "the streams wait for each other"
                return
            head = self.rng.choice(ready).popleft()
            if not isinstance(head, LateMark):
                head()

    def run_all(self) -> None:
        while self.passes or self.copies:
            self.run(1)

    def mark_on(self, stream: deque[_Work | LateMark]) -> LateMark:
        mark = LateMark(self)
        stream.append(lambda: setattr(mark, "passed", True))
        return mark

    @contextmanager
    def off_limits(self) -> Iterator[None]:
        """What happens here is the work of threads, which may not call the device, nor PyTorch."""
        self._off_limits = True
        try:
            with _NoOperators():
                yield
        finally:
            self._off_limits = False

    def called(self) -> None:
        assert not self._off_limits, "a thread calls the device"

    # -- as the mover sees it

    def launch(self, work: _Work) -> Mark:
        self.called()
        self.after_passes()
        self.copies.append(work)
        return self.mark_on(self.copies)

    def after_passes(self) -> None:
        self.copies.append(self.mark_on(self.passes))

    def before_passes(self, mark: Mark) -> None:
        self.called()
        assert isinstance(mark, LateMark)
        self.passes.append(mark)

    # -- as the worker sees it

    def read_back(self, tensor: torch.Tensor) -> LateRow:
        self.called()
        row = LateRow()
        self.passes.append(lambda: row.found.append(tensor.clone()))
        row.mark = self.mark_on(self.passes)
        return row


class LateRow:
    """A tensor on its way to the host."""

    mark: LateMark

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def value(self) -> torch.Tensor:
        self.mark.wait()
        return self.found[0]


class LateBlocks(TransitionBlocks):
    """Transition blocks whose table is written in the order of the passes."""

    device: LateDevice

    def _write(self, slot: int, row: np.ndarray) -> None:
        self.device.passes.append(lambda: TransitionBlocks._write(self, slot, row))

    def _erase(self, slot: int) -> None:
        self.device.passes.append(lambda: TransitionBlocks._erase(self, slot))


class PoisonedBlocks(HostBlocks):
    """Whoever reads a block before it was filled reads poison."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(count, nbytes, pinned=False)
        self.count = count

    def take(self) -> Block | None:
        if (block := super().take()) is not None:
            block.bytes.fill(POISON)
        return block
