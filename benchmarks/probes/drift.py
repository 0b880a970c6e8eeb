"""``drift``: how far states and hidden states are from full recompute's, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from vllm_hypic.eval.estimates import Estimate, mean
from vllm_hypic.harness.settings import model_name

from ..answers.methods import is_noise, noise_name
from ..answers.tables import wide_console
from ..lib import gate, report
from ..lib.prompts import Shape
from ..lib.report import check_outputs, output_options
from ..lib.settings import SHORTEST
from ..lib.stats import mean_and_interval, relative, share
from .engine_calls import Layers, Observation
from .engine_pair import EnginePair, Probe, PromptRuns, require_long, running_pair
from .options import facts, probe_options, write
from .truth import refusal, true_state

FULL_NAME = "full recompute"
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class MethodDrift:
    """One method against full recompute on the same engine.  Relative Frobenius differences, by layer."""

    method: str
    states: tuple[Estimate, ...]
    """Recurrent states after the prompt, by linear layer."""
    hidden: tuple[Estimate, ...]
    """Last token of the prompt, by decoder layer."""
    truth: Estimate | None
    """First linear layer's state against float64, where its truth is known."""
    kl: Estimate
    """First token, nats."""
    max_abs: Estimate
    """Largest difference of the first token's logprobs."""
    agreement: Estimate
    """Share of prompts with the same first token."""
    computed: Estimate
    """Tokens of the prompt that were computed."""


@dataclass(frozen=True)
class DriftReport:
    """``rows``: full recompute itself, the noise floor, then the methods."""

    layers: Layers
    rows: tuple[MethodDrift, ...]
    no_truth: str | None
    """Why there is no truth of the first layer."""

    def row(self, method: str) -> MethodDrift:
        return next(r for r in self.rows if r.method == method)


def measure(
    pair: EnginePair, segments: int, tokens: int, *, truth: bool, done: Callable[[], None] = lambda: None
) -> DriftReport:
    """Look at every prompt, ``done`` after each; ``truth``: also compute the first layer in float64."""
    prompts_runs: list[PromptRuns] = []
    truths: list[np.ndarray] = []
    no_truth = pair.engine.call(refusal) if truth else NOT_ASKED
    for prompt in pair.prompts(segments, tokens):
        prompts_runs.append(pair.run(prompt))
        if no_truth is None:
            truths.append(pair.engine.call(true_state, prompt.plain()))
        done()
    names = [FULL_NAME, noise_name(pair.probe.noise_chunk), *(m.name for m in pair.probe.methods)]
    return DriftReport(
        pair.layers, aggregate(names, prompts_runs, truths if no_truth is None else None), no_truth
    )


def aggregate(
    names: Sequence[str], prompts_runs: Sequence[PromptRuns], truths: Sequence[np.ndarray] | None
) -> tuple[MethodDrift, ...]:
    """Rows ``names``: full recompute, the noise, the methods."""
    rows = []
    for i, name in enumerate(names):
        seen = [_column(runs, i) for runs in prompts_runs]
        distances = [_distance(runs, i) for runs in prompts_runs]
        rows.append(
            MethodDrift(
                name,
                _by_layer([(s.states, x.full.states) for s, x in zip(seen, prompts_runs, strict=True)]),
                _by_layer([(s.hidden, x.full.hidden) for s, x in zip(seen, prompts_runs, strict=True)]),
                None
                if truths is None
                else mean([relative(s.states[0], t) for s, t in zip(seen, truths, strict=True)]),
                mean([kl for kl, _, _ in distances]),
                mean([gap for _, gap, _ in distances]),
                share([same for _, _, same in distances]),
                mean([float(s.computed) for s in seen]),
            )
        )
    return tuple(rows)


def _column(runs: PromptRuns, i: int) -> Observation:
    return runs.full if i == 0 else (runs.noise, *runs.methods)[i - 1].seen


def _distance(runs: PromptRuns, i: int) -> tuple[float, float, bool]:
    if i == 0:
        return 0.0, 0.0, True
    d = (runs.noise, *runs.methods)[i - 1].distance
    return d.kl, d.max_abs, d.same_argmax


def _by_layer(pairs: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]) -> tuple[Estimate, ...]:
    count = len(pairs[0][1])
    return tuple(
        mean([relative(other[layer], reference[layer]) for other, reference in pairs])
        for layer in range(count)
    )


@click.command(help="Drift of recurrent and hidden states against full recompute, layer by layer.")
@probe_options()
@click.option("--segments", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=128, show_default=True)
@click.option("--truth/--no-truth", default=True, help="Also compute the first layer in float64.")
@output_options
@gate.reporting_failures
def drift(
    probe: Probe, segments: int, tokens: int, truth: bool, json_path: Path | None, plot_path: Path | None
) -> None:
    check_outputs(json_path, plot_path)
    require_long(probe, tokens)
    to = wide_console()
    with (
        report.progress(to, probe.prompts, "starting engines") as steps,
        running_pair(probe, [Shape(segments, tokens)]) as pair,
    ):
        steps.show("prompts")
        found = measure(pair, segments, tokens, truth=truth, done=steps.done)
        described = facts(pair)
    title = f"{model_name(probe.engine.model)}, {segments} x {tokens} tokens, {probe.prompts} prompts"
    to.print(_table(title, found))
    for note in _notes(found):
        to.print(note)
    write(json_path, "drift", described, probe, {"drift": found}, segments=segments, tokens=tokens)
    if plot_path is not None:
        _plot(plot_path, title, found)


def _table(title: str, found: DriftReport) -> Any:
    columns = [""]
    if found.layers.linear:
        columns += ["state 0 / fp64", "state 0", "deepest state"]
    columns += ["last hidden", "KL, nats", "max |dlogp|", "same", "computed"]
    rows = []
    for r in found.rows:
        cells = [r.method]
        if found.layers.linear:
            cells += [
                "" if r.truth is None else mean_and_interval(r.truth),
                mean_and_interval(r.states[0]),
                mean_and_interval(r.states[-1]),
            ]
        cells += [
            mean_and_interval(r.hidden[-1]),
            mean_and_interval(r.kl),
            mean_and_interval(r.max_abs),
            report.percent(r.agreement.value),
        ]
        rows.append([*cells, f"{r.computed.value:.0f}"])
    return report.table(f"{title}: relative differences, mean ± 95 %", columns, rows)


def _notes(found: DriftReport) -> list[str]:
    if not found.layers.linear:
        return ["This model has no linear-attention layers: there are no recurrent states to drift."]
    if found.no_truth not in (None, NOT_ASKED):
        return [f"No float64 state of the first layer: {found.no_truth}."]
    return []


def _plot(path: Path, title: str, found: DriftReport) -> None:
    from ..lib.report import COLOURS
    from ..plots import Axes, Line, plot_lines

    def lines(values: Callable[[MethodDrift], Sequence[Estimate]]) -> list[Line]:
        return [
            Line(
                r.method,
                range(len(values(r))),
                [m.value for m in values(r)],
                [m.low for m in values(r)],
                [m.high for m in values(r)],
                COLOURS["stock"] if is_noise(r.method) else None,
            )
            for r in found.rows[1:]
        ]

    panels = [
        Axes(
            "last token of the prompt",
            "decoder layer",
            "relative difference",
            lines(lambda r: r.hidden),
            log_y=True,
        )
    ]
    if found.layers.linear:
        states = lines(lambda r: r.states)
        panels.insert(
            0, Axes("state after the prompt", "linear layer", "relative difference", states, log_y=True)
        )
    plot_lines(path, panels, title=title)
