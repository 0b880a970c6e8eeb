"""What a check found: errors beside their tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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


def guarded(kernel: str, case: str, dtype: torch.dtype, found: Iterator[Finding]) -> Iterator[Finding]:
    """``found``, and where a kernel raises instead, a failed finding that says so: other cases go on."""
    try:
        yield from found
    except Exception as e:
        what = (str(e).splitlines() or [""])[0]
        yield Finding(kernel, f"{case}: {type(e).__name__}: {what}", kind(dtype), float("inf"), 0.0)


def kind(dtype: torch.dtype) -> str:
    """Its name without the module."""
    return str(dtype).removeprefix("torch.")


def worst(actual: Tensor, exact: Tensor, dims: int, floor: float = 1e-3) -> float:
    """Largest relative error of vectors, the last ``dims`` dimensions, by their norms; 0: there are none.

    NaN counts as infinite. A vector shorter than ``floor`` times the longest is measured against that: single
    ones cancel out.
    """
    if not exact.numel():
        return 0.0
    over = tuple(range(-dims, 0))
    exact = exact.cpu().double()
    error = (actual.cpu().double() - exact).square().sum(over).sqrt()
    size = exact.square().sum(over).sqrt()
    # Where all is zero, any difference is one.
    least = floor * size.max() if size.max() > 0 else torch.tensor(1.0)
    return _finite(float((error / size.clamp(min=least)).max()))


def difference(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; equal infinities do not differ."""
    actual, exact = actual.cpu().double(), exact.cpu().double()
    apart = torch.where(actual == exact, 0.0, (actual - exact).abs())
    return _finite(float(apart.max())) if apart.numel() else 0.0


def _finite(error: float) -> float:
    """A NaN would get lost among others: ``max`` passes it by."""
    return float("inf") if math.isnan(error) else error


def untouched(t: Tensor, written: Tensor) -> float:
    """0 where all of ``t [n, ...]`` outside the rows ``written`` is still NaN, else infinite."""
    rest = torch.ones(len(t), dtype=torch.bool, device=t.device)
    rest[written.to(t.device)] = False
    return 0.0 if bool(t[rest].isnan().all()) else float("inf")
