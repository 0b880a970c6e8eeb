"""What runs on a GPU only, as far as a CPU can tell, and what it is measured against.

Tensors have a shape and a device and hold nothing, CUDA's events have stand-ins; bytes and operations are
counted by hand.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.composed import ComposedPass, Composition, Pool, SegmentPass
from benchmarks.gpu.device import Facts
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
from benchmarks.gpu.layers import Prefill, Stack
from benchmarks.gpu.operators import Operators, SpanRows
from benchmarks.gpu.private import causal_attention
from benchmarks.gpu.rows import OURS, KernelTimes
from benchmarks.gpu.shapes import REAL, AttentionShape, DeltaShape
from benchmarks.gpu.timing import Timer, replayed
from vllm_hypic.harness.stats import Spread

CUDA = torch.device("cuda")
META = torch.device("meta")
"""PyTorch refuses most mixtures of its tensors and the host's, as it does for a GPU's."""


class Nothing:
    """Operators that look at devices and shapes and compute nothing."""

    name = "nothing"

    def span(self, rows: SpanRows, shape: AttentionShape, dtype: torch.dtype) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, scale: float) -> Any:
            assert query.dtype == key.dtype == value.dtype == dtype
            together(query, key, value, table, *rows.slot_mapping, *rows.kv_positions)
            assert key.shape == value.shape and key.shape[1:] == (shape.kv_heads, shape.size)
            return query.new_empty(len(rows.visible_kv_lens), shape.heads, shape.size), None

        def merge_(output: Tensor, lse: Tensor, other: Tensor, other_lse: None) -> None:
            together(output, lse, other)
            assert output.stride(-1) == 1 and lse.shape == other.shape[:2]

        return SimpleNamespace(attend=attend, merge_=merge_)

    def segments(self, rows: Tensor, device: torch.device) -> Any:
        return self.compose(rows, rows, device)

    def compose(self, rows: Tensor, ops: Tensor, device: torch.device) -> Any:
        def run(x: Any, weights: Any, caches: Any, out: Tensor, records: Any) -> None:
            together(x.mixed, x.a, x.b, weights.weight, weights.rate, caches.conv, caches.state, out)
            together(out, records.state, records.conv_tail, records.transitions, records.block_of)
            assert x.mixed.is_contiguous() and x.a.is_contiguous() and x.b.is_contiguous()

        assert rows.device.type == ops.device.type == "cpu" and device == META
        return SimpleNamespace(run=run)

    def capture(self, pool: Any, key: Tensor, value: Tensor, *index: Tensor) -> None:
        together(*pool, key, value, *index)
        assert key.stride(-1) == value.stride(-1) == 1
        assert len(index[0]) == len(index[1]) == len(index[2]) <= len(key)


def together(*tensors: Tensor) -> None:
    assert {t.device.type for t in tensors} == {"meta"}


def test_passes_of_the_real_model_stay_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no generator for such tensors; nothing is drawn either.
    monkeypatch.setattr(torch, "Generator", lambda _: SimpleNamespace(manual_seed=lambda _: None))
    nothing: Operators = Nothing()  # type: ignore[assignment]
    prompt = Composition(4, 4096, 64)
    stack = Stack.random(REAL, prompt.tokens, torch.bfloat16, META)
    monkeypatch.undo()
    tokens = torch.empty(prompt.tokens, dtype=torch.int64, device=META)
    pool = Pool.empty(stack, prompt)
    segments = tokens[: 4 * 4096].view(4, 4096)
    with torch.inference_mode():
        alone = SegmentPass(stack, prompt, pool, range(2, 4), nothing)
        alone.run(segments[2:])
        composed, full = ComposedPass(stack, prompt, pool, nothing), Prefill.of(stack, tokens, nothing)
        for logits in (composed.run(tokens), full.run(8192)):
            together(logits)
            assert logits.shape == (REAL.vocabulary,)
    together(alone.positions, composed.positions, full.positions)
    assert composed.state(0).shape == (32, 128, 128)


def test_causal_attention_with_groups_of_heads() -> None:
    """SDPA's flash attention takes fewer heads of K than of q, and hands out a log-sum-exp per row."""
    with FakeTensorMode():
        q = torch.empty(80, 16, 256, device=CUDA, dtype=torch.bfloat16)
        k = torch.empty(80, 2, 256, device=CUDA, dtype=torch.bfloat16)
        out, lse = causal_attention(q, k, k, 0.1)
    assert out.shape == q.shape and out.dtype == q.dtype and out.stride() == q.stride()
    assert lse.shape == (80, 16) and lse.dtype == torch.float32
    assert out.device.type == lse.device.type == "cuda"


def test_times_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush, begin, call, end; all events are read after one wait."""
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, other: "Event") -> float:
            happened.append("read")
            return 2.0

    scratch = SimpleNamespace(zero_=lambda: happened.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: happened.append("wait"))
    timer = Timer(CUDA, repeats=1, warmup=0, _scratch=scratch)  # type: ignore[arg-type]
    times = timer.measure({"a": lambda: happened.append("a"), "b": lambda: happened.append("b")})
    one = ["flush", "event", "{}", "event"]
    assert happened == [x.format("a") for x in one] + [x.format("b") for x in one] + ["wait", "read", "read"]
    assert times["a"].median == times["b"].median == 2e-3  # milliseconds
    happened.clear()
    Timer(CUDA, 1, 0, wall=True).measure({"a": lambda: happened.append("a")})
    assert happened == ["wait", "a", "wait"]


def test_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"multi_processor_count": 132, "total_memory": 1 << 37, "L2_cache_size": 60 << 20}
    found = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, **sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    facts = Facts.of(CUDA)
    assert str(facts) == "NVIDIA H200, compute capability 9.0"
    assert facts.meaningless is None and facts.l2_cache == 60 << 20


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
