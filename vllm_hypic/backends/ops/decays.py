"""Decays of states, and chunks of rows between which states decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG_TINY = -69.0
"""Decays below e^-69 become 0. Such a decay is invisible beside states of size O(1), but its products are
subnormal, and CPUs multiply subnormal numbers a hundred times more slowly."""


def exp_(x: Tensor) -> Tensor:
    """Compute e^x for x <= 0 in place; results below e^-69 become 0."""
    return torch.threshold_(x, _LOG_TINY, float("-inf")).exp_()


def in_chunks(x: Tensor, length: int) -> Tensor:
    """Return `x` [n, H, size] as [chunks, H, length, size], padded with zeros."""
    chunks = -(-len(x) // length)
    padded = F.pad(x, (0, 0, 0, 0, 0, chunks * length - len(x)))
    return padded.view(chunks, length, *x.shape[1:]).transpose(1, 2)


def chunk_starts(states: Tensor, decays: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Walk over chunks, S <- decay S + added.

    states   [m, H, ...]       m independent states before the chunks
    decays   [chunks, H, ...]  broadcast over a state
    added    [chunks, H, ...]

    Returns (the first state before each chunk, like `added`; the states after the last chunk).
    """
    starts = torch.empty_like(added)
    for start, decay, terms in zip(starts, decays, added, strict=True):
        start.copy_(states[0])
        states = torch.addcmul(terms, decay, states)
    return starts, states
