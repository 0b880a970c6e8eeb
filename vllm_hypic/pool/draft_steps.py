"""Passes of a draft model behind a pass of the model itself, over the same requests and other token rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .step import Batch, BatchRow, ComposedRow, StepContext, capture_row, composed_row
from .upload import upload


def over_the_same(step: StepContext, extra: int) -> StepContext:
    """Return a pass over the rows of ``step``, with ``extra`` more rows at the end of each request."""
    if not extra:
        return step

    def row(of: BatchRow) -> BatchRow:
        index = of.index
        return BatchRow(index, of.q0 + index * extra, of.q1 + (index + 1) * extra, of.s0, of.s1 + extra)

    return StepContext(
        [composed_row(row(c.row), c.stream) for c in step.composed],
        [capture_row(c.request_id, row(c.row), c.plan) for c in step.captures],
        step.device,
        Batch([start + i * extra for i, start in enumerate(step.batch.starts)], step.batch.computed),
        [composed_row(row(c.row), c.stream) for c in step.contexts],
    )


def of_one_token(step: StepContext, at: Sequence[int]) -> StepContext:
    """Return a pass over one token of each request of ``step``, at stream index ``at [requests]``.

    The pass captures no record."""

    def row(of: ComposedRow) -> ComposedRow:
        i = of.row.index
        return composed_row(BatchRow(i, i, i + 1, at[i], at[i] + 1), of.stream)

    return StepContext(
        [row(c) for c in step.reading], [], step.device, Batch(list(range(len(at) + 1)), list(at))
    )


def successors(step: StepContext, tokens: np.ndarray, known: np.ndarray) -> list[torch.Tensor] | None:
    """Return the batch's rows ``[n]`` whose next token in the prompt differs from the pass's next token.

    The result also has these next tokens ``[n]``; both are int64 on the device.  ``None``: no row differs.
    ``tokens [requests, any]`` are the requests' own tokens; the first ``known [requests]`` are given.
    """
    rows = [*(c.row for c in step.composed), *(c.row for c in step.captures)]
    # The token behind a chunk; vLLM takes the prompt's last token instead.
    found = {r.q1 - 1: int(tokens[r.index, r.s1]) for r in rows if r.s1 < known[r.index]}
    for c in step.composed:
        r = c.row
        found |= {r.q0 + at - r.s0: token for at, token in c.stream.plan.successors if r.s0 <= at < r.s1}
    for capture in step.captures:
        if capture.last and capture.plan.successor is not None:
            found[capture.row.q0 + capture.end - 1 - capture.row.s0] = capture.plan.successor
    return (
        upload([np.array(part) for part in zip(*found.items(), strict=True)], step.device) if found else None
    )
