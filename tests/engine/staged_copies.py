"""An engine on the CPU whose records go as on a device: through blocks, by copies that end some steps later.

The passes are the CPU's own and happen at once; the copies are PyTorch's operators.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .engines import Engine, scheduler_of, worker_of

BLOCK_BYTES, BLOCKS = 48 << 10, 4
"""A record takes several."""
POLLS = 3


class PolledMark:
    """Done when it has been asked so often."""

    def __init__(self, stream: "PolledStream") -> None:
        self.stream, self.polls, self.passed = stream, POLLS, False

    def done(self) -> bool:
        self.polls -= 1
        if self.polls < 0:
            self.wait()
        return self.passed

    def wait(self) -> None:
        self.stream.run_to(self)


class PolledStream:
    """Copies happen when a mark behind them is waited for, or was asked for often enough."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], None], PolledMark]] = deque()
        self.launched = 0

    def launch(self, work: Callable[[], None]) -> PolledMark:
        self.launched += 1
        mark = PolledMark(self)
        self._queue.append((work, mark))
        return mark

    def before_passes(self, mark: Any) -> None:
        mark.wait()

    def run_to(self, mark: PolledMark) -> None:
        while not mark.passed:
            work, behind = self._queue.popleft()
            work()
            behind.passed = True


def stage(llm: Any) -> None:
    """From now on, until :func:`unstage`."""
    from vllm_hypic.pool.copy.staged import StagedMover
    from vllm_hypic.pool.copy.staging import HostBlocks

    worker, engine, scheduler = worker_of(llm), llm.llm_engine, scheduler_of(llm)
    llm.hypic_host_mover = worker._mover
    stock = engine.has_unfinished_requests
    # A server's engine steps as long as its scheduler says so; ``LLM`` looks at clients' requests only.
    engine.has_unfinished_requests = lambda: stock() or scheduler.has_requests()
    blocks = HostBlocks(BLOCKS, BLOCK_BYTES, pinned=False)
    _use(worker, StagedMover(worker.runtime.pool, PolledStream(), blocks))


def unstage(llm: Any) -> int:
    """Copies that were launched."""
    worker = worker_of(llm)
    del llm.llm_engine.has_unfinished_requests
    staged = worker._mover
    assert not staged.unfinished and not staged._staged, "copies are left"
    assert staged._blocks.free == BLOCKS
    staged.close()
    _use(worker, llm.hypic_host_mover)
    return int(staged._stream.launched)


def _use(worker: Any, mover: Any) -> None:
    worker._mover = mover
    for link in worker.links:
        if hasattr(link, "codec"):
            link.codec.mover = mover


@contextmanager
def staged(engine: Engine) -> Iterator[None]:
    """Records that move meanwhile go by staged copies; fails if none did."""
    engine.call(stage)
    yield
    assert engine.call(unstage) > 0, "no copy was launched"
