"""Bytes and operations of kernels, counted by hand, and the times that they bound."""

import pytest
import torch

from benchmarks.gpu.floors import (
    Floor,
    Rates,
    Work,
    compose_work,
    copy_work,
    measure_rates,
    merge_work,
    scan_work,
    span_work,
)
from benchmarks.gpu.rows import OURS, KernelTimes
from benchmarks.gpu.shapes import REAL, AttentionShape, DeltaShape
from benchmarks.gpu.timing import Timer, replayed
from benchmarks.lib.stats import Spread

HEADS = AttentionShape(heads=4, kv_heads=2, size=8, rotary=8)
DELTA = DeltaShape(key_heads=1, heads=2, K=4, V=8, taps=3)


def test_span_attention() -> None:
    # Two requests: one with rows that see 3 and 5 columns, one with a row that sees 2.
    work = span_work(HEADS, [[3, 5], [2]], itemsize=2)
    kv = (5 + 2) * 2 * 2 * 8 * 2  # columns, K and V, heads, size, bytes
    query = 3 * 4 * 8 * 2
    out = 3 * 4 * 8 * 4
    lse = 3 * 4 * 4
    assert work.bytes == kv + query + out + lse == 448 + 192 + 384 + 48
    # Per row and column: 8 multiplications and 8 additions for q . k, as many for p v.
    assert work.operations == (3 + 5 + 2) * 4 * 32 == 1280


def test_a_decoded_token_is_bound_by_bytes_a_long_query_by_operations() -> None:
    h100 = Rates(copy=3e12, matmul=8e14)
    one = span_work(REAL.attention, [[16_384]], 2)
    # 16384 columns of 2 heads of 256 elements of 2 bytes, K and V: 32 MiB
    assert one.bytes == pytest.approx(2**25, rel=1e-3)
    assert Floor.of(one, h100).by == "bytes"
    assert Floor.of(one, h100).seconds == pytest.approx(2**25 / 3e12, rel=1e-3)
    many = Floor.of(span_work(REAL.attention, [[16_384] * 512], 2), h100)
    assert many.by == "operations"
    assert many.seconds == pytest.approx(512 * 16_384 * 16 * 1024 / 8e14)


def test_merge_copies_and_gated_delta_rule() -> None:
    # 3 rows of 4 heads of 8 values: output read and written in bf16, the other read in float32, two lse.
    assert merge_work(HEADS, 3, 2) == Work(96 * 2 + 96 * 2 + 96 * 4 + 2 * 12 * 4, 3 * 96)
    assert copy_work(100, 2) == Work(400, 0)
    # q, k [1, 4], v [2, 8]: 24 channels; 2 gates and 2 x 8 outputs per token beside them.
    per_token = (24 + 2 * 2 + 16) * 2
    # Two heads: S^T k, k d^T and S^T q over 32 elements, 2 operations each.
    operations = 2 * 3 * 2 * 32
    assert scan_work(DELTA, 10, 2) == Work(10 * per_token, 10 * operations)
    # T takes S^T k and k d^T over 16 elements; a record is 2 heads of S in float32 and T in fp16.
    record = 2 * (32 * 4 + 16 * 2)
    captured = scan_work(DELTA, 10, 2, segments=3)
    assert captured == Work(10 * per_token + 3 * record, 10 * (operations + 2 * 2 * 2 * 16))
    # A composed request: 10 rows, 3 records with contexts of 2 rows, the state in and out; T S per head.
    composed = compose_work(DELTA, 10, 3, 2)
    assert composed.bytes == 10 * per_token + 3 * (record + 2 * 24 * 2) + 2 * 2 * 32 * 4
    assert composed.operations == 10 * operations + 3 * 2 * (2 * 4 * 4 * 8)


def test_floors_shares_and_ratios() -> None:
    rates = Rates(copy=100.0, matmul=1000.0)
    assert Floor.of(Work(50, 100), rates) == Floor(0.5, "bytes")
    assert Floor.of(Work(50, 900), rates) == Floor(0.9, "operations")
    times = {OURS: Spread.of([2.0, 4.0, 6.0]), "other": Spread.of([1.0, 1.0, 2.0])}
    row = KernelTimes("kernel", "case", times, Work(1, 1), Floor(1.0, "bytes"))
    assert row.share == 0.25  # of the median
    assert row.ratio("other").median == 3.0  # of 2, 4, 3
    assert KernelTimes("kernel", "case", times, None, None).share is None


def test_rates_and_times_are_positive_and_calls_take_turns() -> None:
    timer = Timer(torch.device("cpu"), repeats=4, warmup=1)
    rates = measure_rates(timer)
    assert rates.copy > 0 and rates.matmul > 0
    order: list[str] = []
    spreads = timer.measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert [len(s.values) for s in spreads.values()] == [4, 4]
    assert "".join(order) == "ab" + "abbaabba"  # warm-up, then in turns
    with pytest.raises(ValueError, match="CUDA graphs need a GPU, not cpu"):
        replayed(lambda: None, torch.device("cpu"))
