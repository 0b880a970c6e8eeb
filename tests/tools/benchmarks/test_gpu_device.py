"""What runs on a GPU only, as far as a CPU can tell.

Tensors have a shape and a device and hold nothing, CUDA's events have stand-ins.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.composed import ComposedPass, Composition, Pool, SegmentPass
from benchmarks.gpu.device import Facts
from benchmarks.gpu.layers import Prefill, Stack
from benchmarks.gpu.operators import Operators, SpanRows
from benchmarks.gpu.private import causal_attention
from benchmarks.gpu.shapes import REAL, AttentionShape
from benchmarks.gpu.timing import Timer

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
