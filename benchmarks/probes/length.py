"""``length``: error over the number of segments, and over their length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.estimates import Estimate
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.settings import model_name

from ..answers.tables import wide_console
from ..lib import gate, report
from ..lib.prompts import Shape
from ..lib.report import check_outputs, output_options
from ..lib.settings import SHORTEST
from ..lib.stats import mean_and_interval
from .drift import FULL_NAME, MethodDrift, measure
from .engine_pair import Probe, require_long, running_pair
from .options import facts, probe_options, write


@dataclass(frozen=True)
class LengthRow:
    """One method at one shape: the last layers and the first token of a :class:`~.drift.MethodDrift`."""

    method: str
    state: Estimate | None
    """Deepest linear layer; ``None``: there is none."""
    hidden: Estimate
    kl: Estimate
    max_abs: Estimate
    agreement: Estimate
    computed: Estimate

    @staticmethod
    def of(drift: MethodDrift) -> LengthRow:
        state = drift.states[-1] if drift.states else None
        hidden, last = drift.hidden[-1], (drift.agreement, drift.computed)
        return LengthRow(drift.method, state, hidden, drift.kl, drift.max_abs, *last)


@dataclass(frozen=True)
class ShapeDrifts:
    """One shape: the noise floor, then the methods."""

    shape: Shape
    rows: tuple[LengthRow, ...]


@click.command(help="Drift and first-token error over the number and the length of segments.")
@probe_options("naive-8,block,epic-0,epic-16,hypic-8,seam-4-0+16")
@click.option(
    "--segments", type=Numbers(click.IntRange(1, 256)), default="2,4,8,16,32", show_default=True,
    help="Numbers of segments, each of --tokens tokens.",
)  # fmt: skip
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=128, show_default=True)
@click.option(
    "--lengths", type=Numbers(click.IntRange(SHORTEST, 65536)), default="64,128,256,512,1024",
    show_default=True, help="Lengths of segments, --of each.",
)  # fmt: skip
@click.option("--of", "of", type=click.IntRange(1, 256), default=4, show_default=True)
@output_options
@gate.reporting_failures
def length(
    probe: Probe,
    segments: tuple[int, ...],
    tokens: int,
    lengths: tuple[int, ...],
    of: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    more = [Shape(n, tokens) for n in segments]
    longer = [Shape(of, n) for n in lengths]
    shapes = list(dict.fromkeys([*more, *longer]))
    for shape in shapes:
        require_long(probe, shape.tokens)
    to = wide_console()
    with (
        report.progress(to, probe.prompts * len(shapes), "starting engines") as steps,
        running_pair(probe, shapes) as pair,
    ):
        points = {}
        for shape in shapes:
            steps.show(str(shape))
            found = measure(pair, shape.segments, shape.tokens, truth=False, done=steps.done)
            points[shape] = ShapeDrifts(
                shape, tuple(LengthRow.of(r) for r in found.rows if r.method != FULL_NAME)
            )
        described = facts(pair)
    title = f"{model_name(probe.engine.model)}, {probe.prompts} prompts a cell, mean ± 95 %"
    for name, value in QUANTITIES.items():
        to.print(_table(f"{title}: {name}", list(points.values()), value))
    if not pair.layers.linear:
        to.print("This model has no linear-attention layers: there are no recurrent states to drift.")
    results = {"segments": [points[s] for s in more], "lengths": [points[s] for s in longer]}
    write(
        json_path,
        "length",
        described,
        probe,
        results,
        segments=segments,
        tokens=tokens,
        lengths=lengths,
        of=of,
    )
    if plot_path is not None:
        _plot(plot_path, title, [points[s] for s in more], [points[s] for s in longer])


QUANTITIES: dict[str, Callable[[LengthRow], Estimate | None]] = {
    "drift of the deepest state": lambda r: r.state,
    "KL of the first token, nats": lambda r: r.kl,
    "max |dlogp| of the first token": lambda r: r.max_abs,
}


def _table(title: str, points: Sequence[ShapeDrifts], value: Callable[[LengthRow], Estimate | None]) -> Any:
    rows = []
    for i, first in enumerate(points[0].rows):
        cells = [value(p.rows[i]) for p in points]
        rows.append([first.method, *("" if c is None else mean_and_interval(c) for c in cells)])
    return report.table(title, ["", *(str(p.shape) for p in points)], rows)


def _plot(path: Path, title: str, more: Sequence[ShapeDrifts], longer: Sequence[ShapeDrifts]) -> None:
    from ..lib.report import COLOURS
    from ..plots import Axes, Line, plot_lines

    def panel(points: Sequence[ShapeDrifts], x: Sequence[int], label: str, name: str) -> Axes:
        lines = []
        for i, first in enumerate(points[0].rows):
            cells = [c for p in points if (c := QUANTITIES[name](p.rows[i])) is not None]
            colour = COLOURS["stock"] if i == 0 else COLOURS["naive"] if "naive" in first.method else None
            low, high = [c.low for c in cells], [c.high for c in cells]
            lines.append(Line(first.method, x[: len(cells)], [c.value for c in cells], low, high, colour))
        return Axes(name, label, name.partition(" of ")[0], lines, log_x=True, log_y=True)

    names = [n for n, value in QUANTITIES.items() if value(more[0].rows[0]) is not None][:2]
    panels = [panel(more, [p.shape.segments for p in more], "segments", n) for n in names]
    panels += [panel(longer, [p.shape.tokens for p in longer], "tokens of a segment", n) for n in names]
    plot_lines(path, panels, title=title)
