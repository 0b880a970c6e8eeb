"""The plot of accuracy against time to first token (HYPIC's figure 10, EPIC's figure 6)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_hypic.eval.estimates import Estimate
from vllm_hypic.eval.methods import FULL
from vllm_hypic.eval.scores import Metric

from ..lib.report import COLOURS
from .methods import PREFIX, PREFIX_SAME, is_noise
from .results import FamilyResult, Overall

COLUMNS = 3
LEAST_SPAN = 1.0
"""Points on either side of 0 that a panel shows at least, so that a fraction of a point does not fill it."""
COLOUR_OF = {
    FULL.name: COLOURS["stock"],
    PREFIX.name: COLOURS["prefix"],
    PREFIX_SAME.name: "#17becf",
    "hypic": COLOURS["warm"],
    "naive": COLOURS["naive"],
    "epic": "#9467bd",
    "block": "#8c564b",
}
OTHERS = ("#ff7f0e", "#e377c2", "#bcbd22", "#000000", "#7f7f7f", "#aec7e8", "#98df8a", "#ffbb78", "#c49c94")
"""Colours of all other lines, in turns."""


@dataclass(frozen=True)
class ParetoPoint:
    """A method: ``x`` is its first token's cost, ``y`` its difference to full recompute in points."""

    method: str
    x: float
    y: Estimate

    @property
    def line(self) -> str:
        """Return the name of the method's line, which joins methods that differ only in their width."""
        return re.sub(r"-\d+$", "", self.method)

    @property
    def width(self) -> int:
        found = re.search(r"-(\d+)$", self.method)
        return int(found.group(1)) if found else 0


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    points: tuple[ParetoPoint, ...]
    noise: Estimate | None
    """Difference, in points, of full recompute to itself on another engine."""
    y_label: str = "points to full recompute"


def panels(results: Sequence[FamilyResult], over: Sequence[Overall], metric: Metric) -> list[Panel]:
    """Return a panel for each family and, with several families, a panel for their mean.

    Costs are times to first token, or shares of the prompt that are computed if no times were measured.
    """
    found = [_of_family(r, metric) for r in results]
    if len(results) > 1:
        found.append(_of_all(over))
    return [replace(panel, y_label=f"{metric.value}, {panel.y_label}") for panel in found]


def _of_family(result: FamilyResult, metric: Metric) -> Panel:
    full = result.cells[0]
    points = []
    for c in result.cells:
        x = 100 * c.computed_share
        if full.first_token is not None:
            x = 1000 * c.first_token.median if c.first_token is not None else x
        points.append(ParetoPoint(c.method, x, c.score(metric).difference))
    title = f"{result.family}: full recompute {full.score(metric).mean.value:.1f} %"
    label = "computed, % of the prompt" if full.first_token is None else "warm time to first token, ms"
    return _panel(title, label, points)


def _of_all(over: Sequence[Overall]) -> Panel:
    timed = over[0].first_token_speedup is not None
    points = [
        ParetoPoint(
            o.method,
            100 / o.first_token_speedup if o.first_token_speedup is not None else 100 * o.computed_share,
            o.difference,
        )
        for o in over
    ]
    label = "warm time to first token, % of full recompute's" if timed else "computed, % of the prompt"
    return _panel(f"mean: full recompute {over[0].mean.value:.1f} %", label, points)


def _panel(title: str, x_label: str, points: Sequence[ParetoPoint]) -> Panel:
    """Return a panel with the noise as a band, not as a point, because the noise was not timed."""
    noise = next((p.y for p in points if is_noise(p.method)), None)
    return Panel(title, x_label, tuple(p for p in points if not is_noise(p.method)), noise)


def plot(path: Path, drawn: Sequence[Panel], *, title: str) -> None:
    """Draw the panels into a PNG file."""
    # Unlike pyplot, these classes have no global state and need no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(6.0 * columns, 4.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    colours = _colours(drawn)
    for axis, panel in zip(axes, drawn, strict=False):
        _draw(axis, panel, colours)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    # A legend inside a panel would hide points.
    labelled = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=2 * columns, fontsize=8
    )
    figure.savefig(path, dpi=120, format="png")


def _colours(drawn: Sequence[Panel]) -> dict[str, str]:
    """Return the colours by line, which are the same in all panels."""
    lines = dict.fromkeys(p.line for panel in drawn for p in panel.points)
    others = itertools.cycle(OTHERS)
    return {line: COLOUR_OF.get(line) or next(others) for line in lines}


def _draw(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    if panel.noise is not None:
        low, high = min(panel.noise.low, 0.0), max(panel.noise.high, 0.0)
        axis.axhspan(low, high, color="grey", alpha=0.15, label="full recompute, other chunks")
    for line in dict.fromkeys(p.line for p in panel.points):
        points = sorted((p for p in panel.points if p.line == line), key=lambda p: p.width)
        y = [p.y.value for p in points]
        axis.errorbar(
            [p.x for p in points],
            y,
            yerr=[
                [v - p.y.low for v, p in zip(y, points, strict=True)],
                [p.y.high - v for v, p in zip(y, points, strict=True)],
            ],
            marker="o",
            markersize=4,
            capsize=2,
            elinewidth=0.8,
            label=line,
            color=colours[line],
        )
        for p in points:
            if p.line != p.method:
                axis.annotate(
                    str(p.width), (p.x, p.y.value), xytext=(3, 4), textcoords="offset points", fontsize=7
                )
    axis.set_xscale("log")
    for each in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        each(lambda x, _: f"{x:g}")
    axis.tick_params(axis="x", which="minor", labelsize=7)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -LEAST_SPAN), max(high, LEAST_SPAN))
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(alpha=0.3)
