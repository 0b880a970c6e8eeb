"""What a kernel cannot be faster than: the bytes it must move and the operations it must do, at the rates
that the same device reached in the same run.

Bytes are those of arguments and results, each once: no index tensors, no intermediate values, no rereading.
Operations are multiplications and additions of the plain definition: no recomputation, and none for what
rotates, exponentiates or normalises. Both floors are below what any implementation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .shapes import AttentionShape, DeltaShape
from .timing import Timer

STATE_BYTES = 4  # float32
TRANSITION_BYTES = 2  # float16
PARTIAL_BYTES = 4  # outputs and log-sum-exps of partial attention are float32


@dataclass(frozen=True)
class Work:
    """Bytes to move, operations to do."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class Rates:
    """One device: bytes a second, read and written, of a copy; operations a second of a bf16 product."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Floor:
    """The larger of the two floors, in seconds, and whether it is the bytes' or the operations'."""

    seconds: float
    by: str

    @staticmethod
    def of(work: Work, rates: Rates) -> Floor:
        moving, computing = work.bytes / rates.copy, work.operations / rates.matmul
        return Floor(moving, "bytes") if moving >= computing else Floor(computing, "operations")


def measure_rates(timer: Timer) -> Rates:
    """Rates of a copy of 1 GiB and of a product of 8192 x 8192 matrices; small ones without a GPU."""
    real = timer.device.type == "cuda"
    count, side = (1 << 30, 8192) if real else (1 << 22, 128)
    source = torch.zeros(count, dtype=torch.int8, device=timer.device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=timer.device).bfloat16()
    product = torch.empty_like(a)
    times = timer.measure(
        {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(a, b, out=product)}
    )
    return Rates(2 * count / times["copy"].median, 2 * side**3 / times["matmul"].median)


def span_work(
    shape: AttentionShape,
    visible_kv_lens: Sequence[Sequence[int]],
    itemsize: int,
    kv_itemsize: int | None = None,
) -> Work:
    """Span attention of requests whose rows see ``visible_kv_lens[request][row]`` columns.

    A request's K and V are read once, up to the last column that one of its rows sees.
    """
    kv = itemsize if kv_itemsize is None else kv_itemsize
    columns = sum(max(rows, default=0) for rows in visible_kv_lens)
    rows = sum(len(r) for r in visible_kv_lens)
    pairs = sum(sum(r) for r in visible_kv_lens)
    read = columns * 2 * shape.kv_heads * shape.size * kv + rows * shape.heads * shape.size * itemsize
    written = rows * shape.heads * (shape.size + 1) * PARTIAL_BYTES
    return Work(read + written, pairs * shape.heads * 4 * shape.size)


def merge_work(shape: AttentionShape, rows: int, itemsize: int) -> Work:
    """One result is read and written in the model's dtype, the other read in float32; two log-sum-exps."""
    values = rows * shape.heads * shape.size
    sums = 2 * rows * shape.heads * PARTIAL_BYTES
    return Work(values * (2 * itemsize + PARTIAL_BYTES) + sums, 3 * values)


def copy_work(elements: int, itemsize: int) -> Work:
    """So many elements from one place to another."""
    return Work(2 * elements * itemsize, 0)


def scan_work(shape: DeltaShape, tokens: int, itemsize: int, segments: int = 0) -> Work:
    """The gated delta rule over ``tokens`` rows, in order; ``segments`` records of them with T.

    Per token and head: S^T k, k d^T and S^T q, two operations an element each; with T another two of three.
    """
    rows = tokens * (shape.channels + shape.heads * (shape.V + 2)) * itemsize
    states = segments * shape.heads * (shape.K * shape.V * STATE_BYTES + shape.K**2 * TRANSITION_BYTES)
    per_token = 6 * shape.K * shape.V + (4 * shape.K**2 if segments else 0)
    return Work(rows + states, tokens * shape.heads * per_token)


def compose_work(shape: DeltaShape, rows: int, segments: int, itemsize: int) -> Work:
    """A composed request: the delta rule over ``rows``, ``segments`` records; its state is read, written."""
    scan = scan_work(shape, rows, itemsize)
    record = shape.heads * (shape.K * shape.V * STATE_BYTES + shape.K**2 * TRANSITION_BYTES)
    tails = (shape.taps - 1) * shape.channels * itemsize
    state = 2 * shape.heads * shape.K * shape.V * STATE_BYTES
    product = shape.heads * 2 * shape.K**2 * shape.V
    return Work(scan.bytes + segments * (record + tails) + state, scan.operations + segments * product)
