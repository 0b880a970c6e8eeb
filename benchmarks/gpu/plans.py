"""What a step costs on the host before its first layer: working out plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_hypic.backends.ops.program import Mode

from ..lib import report
from ..lib.report import seconds
from ..lib.stats import Spread
from .composed import Composition
from .delta_cases import compose_program
from .operators import Operators
from .shapes import REAL, AttentionShape
from .span_cases import SpanCase, SpanRequest
from .timing import Timer


@dataclass(frozen=True)
class PlanTime:
    """Seconds of the host, once per step, not per layer."""

    what: str
    case: str
    seconds: Spread


def measure_plans(operators: Operators, device: torch.device, repeats: int) -> list[PlanTime]:
    """Span attention's and composition's."""
    shape = REAL.attention
    real = device.type == "cuda"
    columns = 16_384 if real else 64
    prompt = Composition(16, 1024 if real else 32, 64)
    cases = {
        f"decode of 64 requests, {columns} columns each": [SpanRequest.decode(columns)] * 64,
        f"prompt of {prompt.segments} x {prompt.length}": [SpanRequest.prompt(prompt)],
    }
    timer = Timer(torch.device("cpu"), repeats)
    found = []
    for name, requests in cases.items():
        # One head of one element: only the index tensors count.
        small = SpanCase.make(AttentionShape(1, 1, 1, 0), requests, torch.bfloat16, device)
        times = timer.measure({"plan": partial(operators.span, small.rows, shape, torch.bfloat16)})
        found.append(PlanTime("span attention", name, times["plan"]))
    request = [(op.tokens, op.slot, Mode(op.mode)) for op in prompt.operations()]
    program = compose_program([request])
    times = timer.measure({"plan": partial(operators.compose, *program, device)})
    found.append(PlanTime("compose", f"prompt of {prompt.segments} x {prompt.length}", times["plan"]))
    return found


def plans_table(plans: Sequence[PlanTime]) -> Any:
    rows = [(p.what, p.case, seconds(p.seconds.median)) for p in plans]
    return report.table("plan of a step, on the host", ("", "case", "median"), rows)
