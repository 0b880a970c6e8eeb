"""Decays of states."""

from __future__ import annotations

import torch
from torch import Tensor

_LOG_TINY = -69.0
"""Decays below e^-69 become 0: they cannot be seen beside O(1) states, but their products are subnormal,
which CPUs multiply a hundred times more slowly."""


def exp_(x: Tensor) -> Tensor:
    """e^x for x <= 0, in place, with what is too small to matter set to 0."""
    return torch.threshold_(x, _LOG_TINY, float("-inf")).exp_()
