"""Grid search for the setting that saves most FLOPs on a window of accesses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .replay import Setting, Window

ALPHAS = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
PATIENCES = (0.0, 200.0, 2000.0, math.inf)
MARGIN = 0.01
"""A setting is chosen if it gains this share over plain LRU: less may be the window's luck."""


@dataclass(frozen=True)
class Tuned:
    """A setting, the share of FLOPs that it saved in the window, that of LRU, and how many were tried."""

    setting: Setting
    share: float
    lru_share: float
    replays: int


def best_setting(
    window: Window, budget: int, *, choosy: bool, stopped: Callable[[], bool] | None = None
) -> Tuned:
    """Search ``alpha``, letting every newcomer in; if ``choosy`` then ``patience``, and ``alpha`` once more.

    Raises ``Interrupted`` soon after ``stopped`` says so.
    """
    saved: dict[Setting, float] = {}

    def best(settings: list[Setting]) -> Setting:
        for setting in settings:
            if setting not in saved:
                saved[setting] = window.saved(budget, setting, stopped)
        return max(settings, key=saved.__getitem__)  # the first of equals: the least alpha and patience

    chosen = best([Setting(alpha) for alpha in ALPHAS])
    if choosy:
        chosen = best([Setting(chosen.alpha, patience) for patience in PATIENCES])
        chosen = best([Setting(alpha, chosen.patience) for alpha in ALPHAS])
    lru = Setting()
    if saved[chosen] <= saved[lru] * (1 + MARGIN):
        chosen = lru
    asked = window.asked or 1.0
    return Tuned(chosen, saved[chosen] / asked, saved[lru] / asked, len(saved))
