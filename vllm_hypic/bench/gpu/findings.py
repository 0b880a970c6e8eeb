"""What a check found: errors beside their tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import report


@dataclass(frozen=True)
class Finding:
    """The largest error of a kernel's results in one case; NaN fails."""

    kernel: str
    case: str
    dtype: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def worst(actual: Tensor, exact: Tensor, dims: int, floor: float = 1e-3) -> float:
    """Largest relative error of vectors, the last ``dims`` dimensions, by their norms; 0: there are none.

    A vector shorter than ``floor`` times the longest is measured against that: single ones cancel out.
    """
    if not exact.numel():
        return 0.0
    over = tuple(range(-dims, 0))
    exact = exact.cpu().double()
    error = (actual.cpu().double() - exact).square().sum(over).sqrt()
    size = exact.square().sum(over).sqrt()
    # Where all is zero, any difference is one.
    least = floor * size.max() if size.max() > 0 else torch.tensor(1.0)
    return float((error / size.clamp(min=least)).max())


def difference(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; equal infinities do not differ."""
    actual, exact = actual.cpu().double(), exact.cpu().double()
    apart = torch.where(actual == exact, 0.0, (actual - exact).abs())
    return float(apart.max()) if apart.numel() else 0.0


def untouched(t: Tensor, written: Tensor) -> float:
    """0 where all of ``t [n, ...]`` outside the rows ``written`` is still NaN, else infinite."""
    rest = torch.ones(len(t), dtype=torch.bool, device=t.device)
    rest[written.to(t.device)] = False
    return 0.0 if bool(t[rest].isnan().all()) else float("inf")


def findings_table(found: Sequence[Finding]) -> Any:
    rows = [
        (f.kernel, f.case, f.dtype, f"{f.error:.1e}", f"{f.tolerance:.0e}", "" if f.passed else "FAILED")
        for f in found
    ]
    return report.table("errors against float64", ("kernel", "case", "dtype", "error", "allowed", " "), rows)
