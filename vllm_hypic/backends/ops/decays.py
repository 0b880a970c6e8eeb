"""Decays of states."""

from __future__ import annotations

import torch
from torch import Tensor

_LOG_TINY = -69.0
"""Decays below e^-69 become 0. Such a decay is invisible beside states of size O(1), but its products are
subnormal, and CPUs multiply subnormal numbers a hundred times more slowly."""


def exp_(x: Tensor) -> Tensor:
    """Compute e^x for x <= 0 in place; results below e^-69 become 0."""
    return torch.threshold_(x, _LOG_TINY, float("-inf")).exp_()
