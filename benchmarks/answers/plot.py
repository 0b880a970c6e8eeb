"""The plot of answers over what is recomputed, of reports of ``python -m benchmarks.answers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from vllm_hypic.eval.estimates import Estimate
from vllm_hypic.eval.methods import FULL

from .pareto import Panel, ParetoPoint, plot

COMPUTED = "computed, % of the prompt"


@click.command("plot-answers")
@click.argument(
    "reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--plot", "path", required=True, type=click.Path(dir_okay=False, path_type=Path))
def answers(reports: Sequence[Path], path: Path) -> None:
    """Draw REPORTS of `python -m benchmarks.answers --json`, of one model: right answers and likelihoods over
    the share of the prompt that is computed, a panel for each family and one for the mean of the questions.

    The mean has the methods that all families of questions have. A family of several reports is one panel
    (each report counts from its own full recompute); prompts and score above it are the first report's.
    """
    found = [_read(report) for report in reports]
    if len(models := {model for model, _ in found}) > 1:
        raise click.UsageError(f"reports of several models: {', '.join(sorted(models))}")
    results = [result for _, result in found]
    questions = _merged(_questions, [family for result in results for family in result["families"]])
    texts = _merged(_texts, [family for result in results for family in result["texts"]])
    mean = [_mean(questions)] if len(questions) > 1 else []
    plot(path, [*questions, *mean, *texts], title=models.pop())


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The model, and what was found."""
    try:
        report = json.loads(path.read_text())
        return report["settings"]["model"], {"families": [], "texts": [], **report["results"]}
    except (ValueError, KeyError, TypeError) as e:
        raise click.UsageError(f"{path}: no report of python -m benchmarks.answers: {e!r}") from e


def _merged(panel: Callable[[dict[str, Any]], Panel], families: Sequence[dict[str, Any]]) -> list[Panel]:
    """A panel for each name, with the points of all families of that name."""
    found: dict[str, Panel] = {}
    for family in families:
        new = panel(family)
        first = found.setdefault(family["family"], new)
        if first is not new:
            found[family["family"]] = replace(first, points=(*first.points, *new.points))
    return list(found.values())


def _cells(family: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """What is not full recompute, and the percentage of the prompt that it computes."""
    for cell in family["cells"]:
        if not cell["method"].startswith(FULL.name):
            yield cell, 100 * cell["computed_tokens"] / cell["prompt_tokens"]


def _questions(family: dict[str, Any]) -> Panel:
    points = [
        ParetoPoint(cell["method"], computed, Estimate(**cell["contains"]["difference"]))
        for cell, computed in _cells(family)
    ]
    full = family["cells"][0]["contains"]["mean"]["value"]
    title = f"{family['family']}, {family['prompts']} prompts: full recompute {full:.1f} %"
    return Panel(title, COMPUTED, tuple(points), None, "right answers, points to full recompute")


def _texts(family: dict[str, Any]) -> Panel:
    points = [
        ParetoPoint(cell["method"], computed, Estimate(**cell["increase"]))
        for cell, computed in _cells(family)
    ]
    full = family["cells"][0]["nll"]["value"]
    title = f"{family['family']}, {family['prompts']} prompts: full recompute {full:.3f} nats a token"
    return Panel(title, COMPUTED, tuple(points), None, "NLL, % above full recompute (less is better)")


def _mean(panels: Sequence[Panel]) -> Panel:
    """Families count alike; they were sampled apart, so variances add up."""
    by_method = [{point.method: point for point in panel.points} for panel in panels]
    points = []
    for method in by_method[0]:
        if not all(method in found for found in by_method):
            continue
        each = [found[method] for found in by_method]
        value = fmean(p.y.value for p in each)
        half = sum(((p.y.high - p.y.low) / 2) ** 2 for p in each) ** 0.5 / len(each)
        y = Estimate(value, value - half, value + half, sum(p.y.n for p in each))
        points.append(ParetoPoint(method, fmean(p.x for p in each), y))
    return Panel(f"mean of {len(panels)} families", COMPUTED, tuple(points), None, panels[0].y_label)
