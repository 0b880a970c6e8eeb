"""Full attention in float64, and streams that read records, for tests of attention layers on CUDA."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vllm_hypic.pool.plans import ComposePoint, StreamPlan


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row r over columns ``[hidden[r], seen[r])``, float64: ``[rows, heads, size]``, lse ``[heads,
    rows]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("rhd,chd->hrc", query.double(), key) * scale
    at = torch.arange(len(key))[None, :]
    unseen = at >= seen[:, None]
    if hidden is not None:
        unseen |= at < hidden[:, None]
    scores = scores.masked_fill(unseen[None], -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    return torch.einsum("hrc,chd->rhd", (scores - lse[..., None]).exp(), value), lse


def stream(columns: Sequence[torch.Tensor], records: list[int], at: list[int], length: int) -> StreamPlan:
    """A stream of ``length`` tokens that sees record ``records[i]``, whose slots are ``columns[records[i]]``,
    from index ``at[i]`` on, where the record stands in the prompt."""
    slots = np.concatenate([columns[r].numpy() for r in records])
    counts = [len(columns[r]) for r in records]
    points = tuple(ComposePoint(*of, False) for of in zip(at, records, counts, strict=True))
    before = [sum(c for a, c in zip(at, counts, strict=True) if a <= i) for i in range(length)]
    positions = np.arange(length) + before
    places = np.setdiff1d(np.arange(length + sum(counts)), positions)
    return StreamPlan(positions, length + sum(counts), points, slots, places, use_transition=True)


def table_of(positions: int, rotary: int) -> torch.Tensor:
    """A cos/sin table with an mscale."""
    at = torch.arange(positions)[:, None] / 10 ** (torch.arange(rotary // 2)[None, :] / 4)
    return 1.2 * torch.cat([at.cos(), at.sin()], dim=-1)
