"""``attention``: K and V by distance from the ends of their segment, and where the question looks.

K and V of a method are what its request really attends to: reused ones of the public pool and, in seams,
those that it computed.  With ``block`` nothing but the question is computed, so its curve is that of segments
prefilled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from ..lib.stats import mean_and_interval
from .engine_calls import AttentionObservation
from .engine_pair import EnginePair, Probe, PromptRuns, require_long, running_pair
from .options import facts, probe_options, write

EDGE = 64
"""Longest distance from an end that is told apart."""


@dataclass(frozen=True)
class Zone:
    """Distances ``[first, stop)`` from an end of a segment: its outermost token has distance 0."""

    first: int
    stop: int

    def __str__(self) -> str:
        return str(self.first) if self.stop == self.first + 1 else f"{self.first}-{self.stop - 1}"


def zones(tokens: int) -> tuple[Zone, ...]:
    """Zones of either end of a segment of ``tokens`` tokens, up to its middle or :data:`EDGE`."""
    bounds = [0, 1, 2, 4, 8, 16, 32, 64]
    last = min(EDGE, tokens // 2)
    bounds = [b for b in bounds if b < last] + [last]
    return tuple(Zone(a, b) for a, b in pairwise(bounds))


@dataclass(frozen=True)
class Profile:
    """A quantity of a segment's tokens, mean over segments and prompts.

    ``head`` and ``tail`` by zone; ``middle``: the second and third quarter; the curves by distance.
    """

    head: tuple[Estimate, ...]
    middle: Estimate
    tail: tuple[Estimate, ...]
    head_curve: tuple[float, ...]
    tail_curve: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[np.ndarray]) -> Profile:
        """``values``: per prompt ``[segments, tokens]``."""
        tokens = values[0].shape[1]
        curve = np.mean([v.mean(0) for v in values], 0)
        edge, within = min(EDGE, tokens // 2), zones(tokens)
        mirrored = [v[:, ::-1] for v in values]
        return Profile(
            tuple(_mean(values, z.first, z.stop) for z in within),
            _mean(values, tokens // 4, 3 * tokens // 4),
            tuple(_mean(mirrored, z.first, z.stop) for z in within),
            tuple(curve[:edge].tolist()),
            tuple(curve[::-1][:edge].tolist()),
        )


def _mean(values: Sequence[np.ndarray], first: int, stop: int) -> Estimate:
    return mean([float(v[:, first:stop].mean()) for v in values])


@dataclass(frozen=True)
class Deviation:
    """One layer under one method against full recompute; relative, token by token.

    ``seen``: deviation of V, weighed by the question's attention to it and summed over all documents: an
    upper bound of what it does to the layer's output, relative to a typical V.  ``seen_head``, ``seen_tail``:
    the share of that from the first and the last quarter of the segments.
    """

    method: str
    layer: str
    key: Profile
    value: Profile
    seen: Estimate
    seen_head: Estimate
    seen_tail: Estimate


@dataclass(frozen=True)
class AttentionReport:
    """``weights``: by layer, the question's attention under full recompute, relative to equal shares of
    the prompt; ``rows``: the noise floor, then the methods, each layer by layer."""

    zones: tuple[str, ...]
    weights: dict[str, Profile]
    rows: tuple[Deviation, ...]

    def row(self, method: str, layer: str) -> Deviation:
        return next(r for r in self.rows if (r.method, r.layer) == (method, layer))


def measure(
    pair: EnginePair, segments: int, tokens: int, *, done: Callable[[], None] = lambda: None
) -> AttentionReport:
    """Look at every prompt, ``done`` after each.  The model must have full-attention layers."""
    names = [noise_name(pair.probe.noise_chunk), *(m.name for m in pair.probe.methods)]
    found: list[list[list[_Tokens]]] = [[[] for _ in pair.layers.attention] for _ in names]
    weights: list[list[np.ndarray]] = [[] for _ in pair.layers.attention]
    for prompt in pair.prompts(segments, tokens):
        runs = pair.run(prompt, kv=True)
        for layer, full in enumerate(runs.full.attention):
            weights[layer].append(_cut(full.weights * len(prompt), runs))
            for row, run in zip(found, (runs.noise, *runs.methods), strict=True):
                row[layer].append(_Tokens.of(run.seen.attention[layer], full, runs))
        done()
    rows = [
        _deviation(name, layer, found[i][j])
        for i, name in enumerate(names)
        for j, layer in enumerate(pair.layers.attention)
    ]
    shares = {n: Profile.of(w) for n, w in zip(pair.layers.attention, weights, strict=True)}
    return AttentionReport(tuple(map(str, zones(tokens))), shares, tuple(rows))


@dataclass(frozen=True)
class _Tokens:
    """One prompt, one layer: deviations of K and V, and V's weighed by attention, ``[segments, tokens]``."""

    key: np.ndarray
    value: np.ndarray
    seen: np.ndarray

    @staticmethod
    def of(other: AttentionObservation, full: AttentionObservation, runs: PromptRuns) -> _Tokens:
        value = token_deviation(other.value, full.value)
        return _Tokens(
            _cut(token_deviation(other.key, full.key), runs),
            _cut(value, runs),
            _cut(value * full.weights, runs),
        )


def token_deviation(other: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Per token (row), the norm of the difference over the reference's root mean square norm."""
    typical = np.sqrt((np.linalg.norm(reference, axis=1) ** 2).mean())
    found: np.ndarray = np.linalg.norm(other - reference, axis=1) / typical
    return found


def _cut(values: np.ndarray, runs: PromptRuns) -> np.ndarray:
    """Values of a prompt's tokens as ``[segments, tokens]`` of its documents."""
    documents = runs.prompt.documents
    first, tokens = len(runs.prompt.head), len(documents[0])
    return values[first : first + len(documents) * tokens].reshape(len(documents), tokens)


def _deviation(method: str, layer: str, prompts: Sequence[_Tokens]) -> Deviation:
    quarter = prompts[0].seen.shape[1] // 4
    sums = [max(float(p.seen.sum()), 1e-30) for p in prompts]
    return Deviation(
        method,
        layer,
        Profile.of([p.key for p in prompts]),
        Profile.of([p.value for p in prompts]),
        mean([float(p.seen.sum()) for p in prompts]),
        mean([float(p.seen[:, :quarter].sum()) / s for p, s in zip(prompts, sums, strict=True)]),
        mean([float(p.seen[:, -quarter:].sum()) / s for p, s in zip(prompts, sums, strict=True)]),
    )


@click.command(help="Deviation of K and V by distance from segments' ends, and the question's attention.")
@probe_options("block,epic-0,epic-16,hypic-8,seam-4-0+16")
@click.option("--segments", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=128, show_default=True)
@output_options
@gate.reporting_failures
def attention(
    probe: Probe, segments: int, tokens: int, json_path: Path | None, plot_path: Path | None
) -> None:
    check_outputs(json_path, plot_path)
    require_long(probe, tokens)
    to = wide_console()
    with (
        report.progress(to, probe.prompts, "starting engines") as steps,
        running_pair(probe, [Shape(segments, tokens)]) as pair,
    ):
        if not pair.layers.attention:
            raise click.UsageError("this model has no full-attention layers: there are no K and V to compare")
        steps.show("prompts")
        found = measure(pair, segments, tokens, done=steps.done)
        described = facts(pair)
    title = f"{model_name(probe.engine.model)}, {segments} x {tokens} tokens, {probe.prompts} prompts"
    for layer in found.weights:
        to.print(_table(f"{title}; {layer}", found, layer))
    write(json_path, "attention", described, probe, {"attention": found}, segments=segments, tokens=tokens)
    if plot_path is not None:
        _plot(plot_path, title, found)


def _table(title: str, found: AttentionReport, layer: str) -> Any:
    """Distances down, methods across."""
    rows, weights = [r for r in found.rows if r.layer == layer], found.weights[layer]
    profiles = [weights, *(r.value for r in rows)]
    lines = [[f"{z} from the head", *(f"{p.head[i].value:.2g}" for p in profiles)] for i, z in _each(found)]
    lines.append(["middle half", *(f"{p.middle.value:.2g}" for p in profiles)])
    lines += [
        [f"{z} from the tail", *(f"{p.tail[i].value:.2g}" for p in profiles)]
        for i, z in reversed(_each(found))
    ]
    lines.append(["seen by the question", "", *(mean_and_interval(r.seen) for r in rows)])
    lines.append(["  in heads' quarters", "", *(report.percent(r.seen_head.value) for r in rows)])
    lines.append(["  in tails' quarters", "", *(report.percent(r.seen_tail.value) for r in rows)])
    columns = ["deviation of V", "attention", *(r.method for r in rows)]
    return report.table(title, columns, lines)


def _each(found: AttentionReport) -> list[tuple[int, str]]:
    return list(enumerate(found.zones))


def _plot(path: Path, title: str, found: AttentionReport) -> None:
    from ..lib.report import COLOURS
    from ..plots import Axes, Line, plot_lines

    layer = list(found.weights)[-1]
    panels = []
    for end in ("head", "tail"):
        lines = []
        for r in (r for r in found.rows if r.layer == layer):
            curve = getattr(r.value, f"{end}_curve")
            colour = COLOURS["stock"] if is_noise(r.method) else None
            lines.append(Line(r.method, range(len(curve)), curve, colour=colour))
        label = f"tokens from the segment's {end}"
        panels.append(Axes(f"V, {end}", label, "relative deviation", lines, log_y=True))
    weights = found.weights[layer]
    lines = [
        Line(f"from the {end}", range(len(curve)), curve)
        for end, curve in (("head", weights.head_curve), ("tail", weights.tail_curve))
    ]
    panels.append(Axes("attention of the question", "tokens from the end", "relative to equal shares", lines))
    plot_lines(path, panels, title=f"{title}; {layer}")
