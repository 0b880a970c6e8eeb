"""Records whose dead heads the device tells late: nothing waits, nothing is counted twice, nothing is lost.

The device is a stand-in that answers when the test says so; the order of the calls to CUDA is tested in
``moving/test_cuda_copies.py``.
"""

from functools import partial

import numpy as np
import pytest
import torch

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.pool.copy.stream import CPUSideStream, side_stream_of
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.step import BatchRow, StepContext, capture_row
from vllm_hypic.pool.transition_blocks import NO_BLOCK, TransitionBlocks

CPU = torch.device("cpu")
HEADS, SLOTS, BLOCKS = (2, 3), 4, 12


def books(kind: str) -> TransitionBlocks:
    return TransitionBlocks(BLOCKS, 4, HEADS, SLOTS, torch.float16, CPU, joint=kind == "device")


@pytest.mark.parametrize("kind", ["host", "device"])
def test_books_of_transition_blocks(kind: str) -> None:
    blocks = books(kind)
    assert all(t.is_contiguous() for t in blocks.block_of) == (kind == "host")
    blocks.offer(1)
    assert blocks.free == BLOCKS - sum(HEADS)
    assert [t.shape for t in blocks.block_of] == [(SLOTS, n) for n in HEADS]
    offered = blocks.row(1).tolist()
    assert len(set(offered)) == sum(HEADS) and NO_BLOCK not in offered
    assert blocks.row(0).tolist() == [NO_BLOCK] * sum(HEADS)
    # A kernel finds two heads dead.
    blocks.block_of[0][1, 1] = blocks.block_of[1][1, 0] = NO_BLOCK
    row = blocks.row(1).clone()
    assert row.tolist() == [offered[0], NO_BLOCK, NO_BLOCK, *offered[3:]]
    assert blocks.settle(1, row) == 3 and blocks.free == BLOCKS - 3
    assert blocks.settle(1) == 3 and blocks.free == BLOCKS - 3, "settled twice"
    blocks.offer(2)
    assert not set(blocks.row(2).tolist()) & {offered[0], *offered[3:]}, "a transition block of two records"
    blocks.release([1, 2, 3])
    assert blocks.free == BLOCKS and blocks.row(1).tolist() == [NO_BLOCK] * sum(HEADS)
    assert blocks.settle(1) == 0


def test_a_record_that_goes_before_it_is_settled_gives_everything_back() -> None:
    blocks = books("device")
    blocks.offer(1)
    blocks.release([1])
    assert blocks.free == BLOCKS
    blocks.offer(0), blocks.offer(1)
    with pytest.raises(RuntimeError, match="transition blocks wanted"):
        blocks.offer(2)


class LateRow:
    """A row on its way."""

    def __init__(self, row: torch.Tensor) -> None:
        self.row, self.here = row.clone(), False

    def value(self) -> torch.Tensor:
        assert self.here, "the host waited for the device"
        return self.row


class LateStreams:
    behind = True

    def __init__(self) -> None:
        self.sent: list[LateRow] = []

    def read_back(self, tensor: torch.Tensor) -> LateRow:
        self.sent.append(LateRow(tensor))
        return self.sent[-1]


def late_worker(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerConnector, LateStreams]:
    """A worker whose pool keeps its books as on a GPU."""
    linear = tuple(LinearGeometry(f"layers.{i}", n, 4, 4, 3, 8, torch.float32) for i, n in enumerate(HEADS))
    geometry = PoolGeometry((), linear, page_tokens=8, pages=0, slots=SLOTS, transition_blocks=BLOCKS)
    late = LateStreams()
    monkeypatch.setattr("vllm_hypic.connector.worker.connector.side_stream_of", lambda device: late)
    monkeypatch.setattr("vllm_hypic.pool.tensors.TransitionBlocks", partial(TransitionBlocks, joint=True))
    worker = WorkerConnector(geometry, HypicConfig())
    worker.start(CPU)
    return worker, late


def capture(worker: WorkerConnector, slot: int, serial: int, *, leading: bool = False, dead: int = 0) -> None:
    """A pass that completes a record, ``dead`` heads of which have forgotten."""
    plan = CapturePlan(0, 4, slot, np.arange(4), None, leading, serial)
    worker.runtime.step = StepContext([], [capture_row(f"r{serial}", BatchRow(0, 0, 4, 0, 4), plan)], CPU)
    if not leading:
        worker.runtime.pool.transition_blocks.offer(slot)
        worker.runtime.pool.transition_blocks.block_of[1][slot, :dead] = NO_BLOCK
    worker.end_step()


def test_tiles_are_reported_one_pass_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device says by then: ranks must report a record in the same pass."""
    worker, streams = late_worker(monkeypatch)
    capture(worker, 0, serial=1, dead=2)
    assert worker.take_report() is None
    streams.sent[0].here = True
    assert worker.take_report() is None
    capture(worker, 1, serial=2, dead=1)
    assert worker.take_report().transition_blocks == {1: 3}
    streams.sent[1].here = True
    worker.end_step()
    assert worker.take_report().transition_blocks == {2: 4}
    worker.end_step()
    assert worker.take_report() is None


def test_the_row_is_read_as_the_pass_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later pass may reuse the table's row before the copy is looked at."""
    worker, streams = late_worker(monkeypatch)
    capture(worker, 0, serial=1, dead=2)
    worker.runtime.pool.transition_blocks.row(0).fill_(5)
    streams.sent[0].here = True
    worker.end_step()
    assert worker.take_report().transition_blocks == {1: 3}


def test_a_record_that_is_dropped_meanwhile_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, streams = late_worker(monkeypatch)
    capture(worker, 0, serial=1, dead=2)
    worker.absorb(HypicMetadata(dropped_slots=[0]))
    capture(worker, 0, serial=2, dead=1)
    streams.sent[1].here = True
    worker.end_step()
    assert worker.take_report().transition_blocks == {2: 4}
    worker.absorb(HypicMetadata(dropped_slots=[0]))
    assert worker.runtime.pool.transition_blocks.free == BLOCKS


def test_ranks_report_a_record_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler takes a record's first report as final: it must hold what the fullest rank needs, however
    long each device took."""
    ranks = [late_worker(monkeypatch) for _ in range(2)]
    reports = []
    for serial, dead in ((1, (2, 0)), (2, (0, 1))):
        for (worker, _), forgotten in zip(ranks, dead, strict=True):
            capture(worker, serial, serial=serial, dead=forgotten)
        for _, streams in ranks:
            streams.sent[-1].here = True
        ours, theirs = (worker.take_report() for worker, _ in ranks)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            reports.append(ours.aggregate(theirs).transition_blocks)
    for worker, _ in ranks:
        worker.end_step()
    ours, theirs = (worker.take_report() for worker, _ in ranks)
    reports.append(ours.aggregate(theirs).transition_blocks)
    assert reports == [{1: 5}, {2: 5}]
    for worker, _ in ranks:
        free = worker.runtime.pool.transition_blocks.free
        assert free >= BLOCKS - 10, "a rank holds more than the scheduler counts"


def test_leading_records_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, streams = late_worker(monkeypatch)
    capture(worker, 0, serial=1, leading=True)
    assert not streams.sent and worker.take_report() is None


def test_on_the_cpu_everything_is_there_at_once() -> None:
    assert isinstance(side_stream_of(CPU), CPUSideStream)
    tensor = torch.arange(3)
    back = CPUSideStream().read_back(tensor)
    tensor.zero_()
    assert back.value().tolist() == [0, 1, 2]
