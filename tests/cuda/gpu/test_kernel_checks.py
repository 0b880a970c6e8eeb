"""The checks of kernels pass where kernels are right, and name the kernel that is not."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import sdpa
from benchmarks.gpu.findings import Finding, difference, untouched, worst
from benchmarks.gpu.kernels import CHECKS, DTYPES, run_checks
from benchmarks.gpu.operators import SpanRows, SpanStep, TorchOperators, _TorchSpan
from benchmarks.gpu.shapes import TINY, AttentionShape
from benchmarks.gpu.span_cases import SpanCase, SpanRequest
from vllm_hypic.backends.ops.mamba2 import eager as mamba2
from vllm_hypic.backends.ops.program import ComposeOp, Mode
from vllm_hypic.backends.ops.short_conv import eager as short_conv

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_operators_pass(dtype: str) -> None:
    found = run_checks(TorchOperators(), CPU, list(CHECKS), [dtype])
    assert [f for f in found if not f.passed] == []
    kernels = {f.kernel.strip() for f in found}
    assert {"span attention", "log-sum-exp", "merge", "capture of K and V"} <= kernels
    assert {"windows in a cache", "segments: outputs", "states"} <= kernels
    assert {"records", "compose: outputs"} <= kernels
    # Tolerances are tight enough to mean something: half of each is used up by rounding nowhere.
    assert all(f.error <= f.tolerance / 2 for f in found)


@dataclass(frozen=True)
class Faulty(_TorchSpan):
    """Span attention that does one thing wrong."""

    fault: str = ""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, scale: float, neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        rows, visible_kv_lens = self.rows, self.visible_kv_lens
        if self.fault == "position":
            rows = replace(rows, kv_positions=[p + (p > 8).long() for p in rows.kv_positions])
        elif self.fault == "column":
            visible_kv_lens = torch.where(visible_kv_lens > 1, visible_kv_lens - 1, visible_kv_lens)
        elif self.fault == "window" and rows.hidden_kv_lens is not None:
            rows = replace(rows, hidden_kv_lens=np.maximum(rows.hidden_kv_lens - 1, 0))
        elif self.fault == "pairs":
            neox = not neox
        out, lse = _TorchSpan(rows, self.query_ranges, visible_kv_lens).attend(
            query, key, value, table, scale, neox
        )
        return (out * (1 + 2**-5) if self.fault == "scale" else out), lse

    def merge_(self, output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        if self.fault == "merge":
            other_lse = other_lse + 0.1
        super().merge_(output, lse, other, other_lse)


class FaultyOperators(TorchOperators):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def span(self, rows: SpanRows, shape: AttentionShape, dtype: torch.dtype) -> SpanStep:
        right = super().span(rows, shape, dtype)
        return Faulty(right.rows, right.query_ranges, right.visible_kv_lens, self.fault)

    def capture(self, pool: tuple[Tensor, Tensor], *given: Any) -> None:  # type: ignore[override]
        key, value, rows, slots, positions, *rotation = given
        if self.fault == "capture":
            positions = positions + 1
        super().capture(pool, key, value, rows, slots, positions, *rotation)
        if self.fault == "stray write":
            unused = torch.ones(len(pool[0]), dtype=torch.bool)
            unused[slots] = False
            pool[0][unused.nonzero()[0]] = 0

    def compose(self, rows: Tensor, ops: Tensor, device: torch.device):  # type: ignore[no-untyped-def]
        if self.fault == "transition":
            ops = ops.clone()
            mode = ComposeOp._fields.index("mode")
            ops[ops[:, mode] == Mode.TRANSITION, mode] = Mode.ADD
        return super().compose(rows, ops, device)


@pytest.mark.parametrize(
    ("fault", "kernel", "which"),
    [
        ("tail", "  records, conv_tail", "short_conv"),
        ("state", "  records, state", "mamba2"),
        ("position", "span attention", "span"),
        ("column", "span attention", "span"),
        ("pairs", "span attention", "span"),
        ("window", "span attention", "span"),
        ("scale", "span attention", "span"),
        ("merge", "merge", "span"),
        ("capture", "capture of K and V", "span"),
        ("stray write", "capture of K and V", "span"),
        ("transition", "compose: outputs", "delta"),
    ],
)
def test_a_fault_is_found_and_named(
    fault: str, kernel: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the coarsest dtype, whose tolerances are the widest."""
    if which in ("short_conv", "mamba2"):  # called by their modules
        module = {"short_conv": short_conv, "mamba2": mamba2}[which]
        right = getattr(module, f"{which}_segments")

        def wrong(*given: Any) -> None:
            right(*given)
            records = given[4]
            if fault == "tail":
                records.conv_tail[0] = records.conv_tail[0].roll(1, 0)
            else:
                records.state[0] *= 1 + 2**-5

        monkeypatch.setattr(module, f"{which}_segments", wrong)
    found = run_checks(FaultyOperators(fault), CPU, [which], ["bfloat16"])
    assert kernel in {f.kernel for f in found if not f.passed}


def test_what_a_kernel_raises_is_a_failure_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    monkeypatch.setattr(TorchOperators, "capture", fails)
    found = run_checks(TorchOperators(), CPU, ["span"], ["float16"])
    [failed] = [f for f in found if not f.passed]
    assert failed.kernel == "capture of K and V" and failed.dtype == "float16"
    assert failed.case.endswith("RuntimeError: out of resource: shared memory")
    assert "windows in a cache" in {f.kernel for f in found}


def test_errors_of_vectors() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    off = exact.clone()
    off[1, 0] += 0.05
    assert worst(off, exact, 1) == pytest.approx(0.1)
    off[2, 0] = 1e-3  # a vector of nothing is measured against the longest
    assert worst(off, exact, 1, floor=0.1) == pytest.approx(0.1)
    assert worst(torch.full((2, 2), torch.nan), torch.ones(2, 2).double(), 1) == float("inf")
    assert worst(torch.ones(1, 2), torch.zeros(1, 2).double(), 1) > 1
    assert worst(torch.ones(0, 2), torch.ones(0, 2).double(), 1) == 0.0
    assert not Finding("k", "c", "d", float("nan"), 1.0).passed


def test_differences_and_stray_writes() -> None:
    inf = float("inf")
    assert difference(torch.tensor([1.0, -inf]), torch.tensor([1.5, -inf])) == 0.5
    assert difference(torch.tensor([0.0]), torch.tensor([-inf])) == inf
    assert difference(torch.tensor([torch.nan]), torch.tensor([0.0])) == inf
    t = torch.full((4, 2), torch.nan)
    t[1] = 1.0
    assert untouched(t, torch.tensor([1])) == 0.0
    assert untouched(t, torch.tensor([2])) == inf


@pytest.mark.parametrize(
    "requests",
    [[SpanRequest(40, (20,) * 3 + (40,) * 2)], [SpanRequest.decode(33)] * 3],
    ids=["two sights", "decode"],
)
def test_sdpa_computes_the_same(requests: list[SpanRequest]) -> None:
    case = SpanCase.make(TINY.attention, requests, torch.float32, CPU)
    span = TorchOperators().span(case.rows, case.shape, torch.float32)
    out, _ = span.attend(case.query, case.key, case.value, case.table, case.shape.scale)
    assert sdpa.difference(case, out) < 1e-5
    assert sdpa.difference(case, out * 1.01) > 1e-3
    parts = sdpa.parts_of(case)
    assert sum(p.query.shape[2] for p in parts) == 2 * len(requests[0].visible_kv_lens)  # groups of 2
    calls = sdpa.variants(case)
    assert "flash" in calls and len(calls) == len(parts)
    assert [r.shape[2] for r in calls["flash"]()] == [p.query.shape[2] for p in parts]


def test_sdpa_needs_requests_that_are_alike() -> None:
    case = SpanCase.make(TINY.attention, [SpanRequest.decode(3), SpanRequest.decode(4)], torch.float32, CPU)
    with pytest.raises(ValueError, match="equal columns"):
        sdpa.parts_of(case)


def test_cases_are_poisoned() -> None:
    case = SpanCase.make(TINY.attention, [SpanRequest(17, (3, 17)), SpanRequest(0, (0,))], torch.float32, CPU)
    used = torch.cat(list(case.rows.slot_mapping))
    assert len(used) == 17 == len(set(used.tolist()))
    assert not case.key[used].isnan().any() and not case.value[used].isnan().any()
    assert untouched(case.key, used) == 0.0
    rows = torch.tensor([1, 2, 4])
    assert case.rows.query_ranges.tolist() == [[1, 3], [4, 5]] and case.rows.seen() == [[3, 17], [0]]
    assert untouched(case.query, rows) == 0.0 and not case.query[rows].isnan().any()
