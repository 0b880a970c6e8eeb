"""Plots of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

DASHES = ("--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """One line: ``y`` over ``x``, with the spread between ``low`` and ``high`` shaded where given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: str | None = None


@dataclass(frozen=True)
class Axes:
    """One panel of a figure."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    log_x: bool = False
    log_y: bool = False
    horizontal: Mapping[str, float] | None = None
    """Dashed lines by label, e.g. a limit."""


def plot_lines(path: Path, panels: Sequence[Axes], *, title: str = "") -> None:
    """Panels side by side, each with its lines."""
    figure, axes = _figure(len(panels), title)
    for axis, panel in zip(axes, panels, strict=True):
        for line in panel.lines:
            [drawn] = axis.plot(line.x, line.y, marker="o", label=line.label, color=line.colour)
            if line.low is not None and line.high is not None:
                axis.fill_between(line.x, line.low, line.high, alpha=0.2, color=drawn.get_color())
        for (label, height), style in zip((panel.horizontal or {}).items(), cycle(DASHES), strict=False):
            axis.axhline(height, linestyle=style, color="black", linewidth=1, label=label)
        if panel.log_x:
            axis.set_xscale("log")
        if panel.log_y:
            axis.set_yscale("log")
        _finish(axis, panel.title, panel.x_label, panel.y_label)
    _save(figure, path)


def plot_bars(
    path: Path,
    groups: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    label: str,
    stacked: bool = False,
    line_at: float | None = None,
) -> None:
    """Horizontal bars: ``groups[group][part] = length``, a group's parts stacked or side by side.

    ``line_at``: a dashed line, e.g. at the ratio 1.
    """
    parts = list(dict.fromkeys(part for group in groups.values() for part in group))
    # The figure's title, not the axis': long labels of groups leave the axis little room.
    figure, [axis] = _figure(1, title, height=1.2 + 0.4 * len(groups) * (1 if stacked else len(parts)))
    width = 0.7 if stacked else 0.8 / max(len(parts), 1)
    base = [0.0] * len(groups)
    for i, part in enumerate(parts):
        lengths = [group.get(part, 0.0) for group in groups.values()]
        shift = 0.0 if stacked else (i - (len(parts) - 1) / 2) * width
        where = [y + shift for y in range(len(groups))]
        axis.barh(where, lengths, width, left=base if stacked else None, label=part or None)
        if stacked:
            base = [b + n for b, n in zip(base, lengths, strict=True)]
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    if line_at is not None:
        axis.axvline(line_at, linestyle="--", color="black", linewidth=1)
    _finish(axis, "", label, "")
    _save(figure, path)


def _figure(panels: int, title: str, height: float = 4.8) -> tuple[Any, list[Any]]:
    # Not pyplot: no global state, and no display is asked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(axis: Any, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, format="png")
