"""PyTorch's own attention on contiguous copies whose K is rotated: what span attention is held against.

A request's query heads are folded into rows, and rows that see equally many columns make one call over just
these: no masks. Every backend of SDPA that takes the case is tried; the fastest counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .findings import worst
from .span_cases import SpanCase

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class Part:
    """Rows of equal sight: ``query [requests, kv_heads, rows * group, size]`` over ``key``, ``value
    [requests, kv_heads, columns, size]``; ``first``: of these rows in each request."""

    query: Tensor
    key: Tensor
    value: Tensor
    first: int


def parts_of(case: SpanCase) -> list[Part]:
    """Parts of requests that are all alike; raises ``ValueError`` for others. Copies K and V once."""
    seen = case.rows.seen()
    if any(rows != seen[0] for rows in seen):
        raise ValueError("the baseline needs requests with equal columns")
    keys, values = case.rotated_copies()
    found, first = [], 0
    for columns, rows in ((n, len(list(same))) for n, same in groupby(seen[0])):
        query = torch.stack(
            [case.query[at + first : at + first + rows] for at in case.rows.query_ranges[:, 0].tolist()]
        )
        folded = query.unflatten(2, (case.shape.kv_heads, -1)).transpose(1, 2).flatten(2, 3).contiguous()
        found.append(Part(folded, keys[:, :, :columns], values[:, :, :columns], first))
        first += rows
    return found


def variants(case: SpanCase) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls by name: one per sight, or, where sights differ, all rows over all columns, which is more work
    in one launch."""
    parts = parts_of(case)
    plans = {"": parts}
    if len(parts) > 1:
        last = parts[-1]
        every = torch.cat([p.query for p in parts], 2)
        plans[", all columns"] = [Part(every, last.key, last.value, 0)]
    found: dict[str, Callable[[], list[Tensor]]] = {}
    for backend in BACKENDS:
        for suffix, plan in plans.items():
            call = _call(plan, case.shape.scale, backend)
            if _works(call):
                found[backend.name.lower().removesuffix("_attention") + suffix] = call
    return found


def difference(case: SpanCase, out: Tensor) -> float:
    """Largest relative difference of a vector of ``out``, span attention's result, from SDPA's."""
    outs = out.unflatten(0, (len(case.rows.query_ranges), -1))
    errors = []
    for part in parts_of(case):
        theirs = F.scaled_dot_product_attention(part.query, part.key, part.value, scale=case.shape.scale)
        rows = theirs.shape[2] // (case.shape.heads // case.shape.kv_heads)
        theirs = theirs.unflatten(2, (rows, -1)).transpose(1, 2).flatten(2, 3)
        errors.append(worst(outs[:, part.first : part.first + rows], theirs, 1))
    return max(errors)


def _call(plan: list[Part], scale: float, backend: SDPBackend) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        with sdpa_kernel(backend):
            return [F.scaled_dot_product_attention(p.query, p.key, p.value, scale=scale) for p in plan]

    return call


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:  # this backend does not take such heads, or is not built
        return False
    return True
