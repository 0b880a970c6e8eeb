"""Relative differences, and how means of them are shown."""

from __future__ import annotations

import numpy as np

from ..estimates import Estimate


def relative(other: np.ndarray, reference: np.ndarray) -> float:
    """Frobenius norm of the difference over the reference's; zero where both are zero."""
    difference = float(np.linalg.norm(other.astype(np.float64) - reference))
    return difference / float(np.linalg.norm(reference)) if difference else 0.0


def shown(estimate: Estimate) -> str:
    """Mean and half its interval: ``0.0041 ±0.0003``."""
    return f"{estimate.value:.2g} ±{(estimate.high - estimate.low) / 2:.1g}"
