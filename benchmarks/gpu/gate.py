"""The model's correctness gate: its passes on a tiny model, on the device that is to be measured, against the
float64 oracle. No time is reported of a model whose gate does not pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
import torch
from torch import Tensor

from vllm_hypic.backends.ops.program import Mode

from . import oracle
from .composed import ComposedPass, Composition, Pool, SegmentPass
from .layers import Prefill, Stack
from .operators import Operators
from .shapes import TINY

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative Frobenius error of logits and states. bf16 on CPU: 6e-3 to 9e-3; float32: 1e-4, from T in fp16.
Without transitions the states are wrong by 9e-2 to 6e-1, the logits by 1e-1."""
PROMPT = Composition(segments=3, length=40, query=7, window=4)
CHUNK = 50


@dataclass(frozen=True)
class Distance:
    """A relative error and what it may be at most; ``planted``: of a fault, which must exceed it."""

    what: str
    error: float
    tolerance: float
    planted: bool = False

    @property
    def passed(self) -> bool:
        # A NaN fails either way.
        return self.error > self.tolerance if self.planted else self.error <= self.tolerance

    def __str__(self) -> str:
        relation = "expected more than" if self.planted else "allowed are"
        return f"{self.what}: {self.error:.2g}, {relation} {self.tolerance:.2g}"


class GateFailed(RuntimeError):
    """Results are wrong: no time is reported."""


def reporting_failures(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show a failed gate as one message, exit code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except GateFailed as e:
            raise click.ClickException(f"correctness gate: {e}") from e

    return wrapped


def check_model(
    operators: Operators, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> list[Distance]:
    """Errors of the ordinary and of the composed pass, and that of a planted fault.

    Raises :class:`GateFailed` when one is out of its bounds.
    """
    stack = Stack.random(TINY, PROMPT.tokens, dtype, device)
    if compiled:
        stack = stack.compile()
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, TINY.vocabulary, (PROMPT.tokens,), generator=drawn).to(device)
    pool = Pool.empty(stack, PROMPT)
    segments = tokens[: PROMPT.segments * PROMPT.length].view(PROMPT.segments, PROMPT.length)
    # Some side by side, one alone.
    for part in (range(0, 2), range(2, 3)):
        SegmentPass(stack, PROMPT, pool, part, operators).run(segments[part.start : part.stop])
    limit = TOLERANCE[dtype]

    truth = oracle.full(stack, tokens)
    prefill = Prefill.of(stack, tokens, operators)
    found = _distances(f"full recompute, chunks of {CHUNK}", prefill.run(CHUNK), prefill.state, truth, limit)
    truth = oracle.composed(stack, PROMPT, tokens)
    composed = ComposedPass(stack, PROMPT, pool, operators)
    found += _distances("composed", composed.run(tokens), composed.state, truth, limit)
    naive = ComposedPass(stack, PROMPT, pool, operators, Mode.ADD)
    faulty = _distances("without transitions", naive.run(tokens), naive.state, truth, limit)
    worst = max(faulty, key=lambda d: d.error)
    found.append(Distance(worst.what, worst.error, limit, planted=True))
    require(found)
    return found


def require(found: Sequence[Distance]) -> None:
    """Raises :class:`GateFailed`, naming everything that is out of its bounds."""
    if failed := [d for d in found if not d.passed]:
        raise GateFailed("; ".join(map(str, failed)))


def relative(actual: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``, in float64."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def _distances(
    what: str, logits: Tensor, state: Callable[[int], Tensor], truth: oracle.Truth, limit: float
) -> list[Distance]:
    states = [
        Distance(f"{what}, state of layer {i}", relative(state(i), exact), limit)
        for i, exact in truth.states.items()
    ]
    return [Distance(f"{what}, logits", relative(logits, truth.logits), limit), *states]
