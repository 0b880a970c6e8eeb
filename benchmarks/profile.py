"""``profile``: where the time to the first token of a request over cached documents goes, by stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.report import console, percent
from vllm_hypic.harness.settings import EngineSettings

from .engine_calls import Operator, Profile, profiled
from .lib import gate, report
from .lib.prompts import BESIDE, HEAD, QUESTION, Shape, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Spread
from .options import needed_context, repeat_options
from .stages import MATRIX_PRODUCTS_AND_ATTENTION, by_stage, stage_of

SHOWN = 12
"""Operators in the second table."""


@dataclass(frozen=True)
class Stages:
    """Mean seconds by stage of one request, measured under the profiler.

    ``wall`` is that request's time, ``unprofiled`` that of the same kind of request without the profiler:
    what recording costs falls on requests with many small operators.
    """

    seconds: dict[str, float]
    wall: float
    unprofiled: Spread
    matrix_products_and_attention: float
    """Share of ``wall``."""


@click.command("profile", help="Times of a warm first token, by stage of the computation.")
@engine_options()
@repeat_options
@click.option("--segments", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=4096, show_default=True)
@click.option("--cold", is_flag=True, help="Profile cold requests instead.")
@output_options
@gate.reporting_failures
def profile(
    engine: EngineSettings,
    segments: int,
    tokens: int,
    cold: bool,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    shape = Shape(segments, tokens)
    profiles, unprofiled, facts = _measure(engine, shape, repeats, seed, cold)
    operators = mean_operators(profiles)
    wall = statistics.mean(p.first_token_s for p in profiles)
    times = by_stage(operators, wall)
    share = sum(times[s] for s in MATRIX_PRODUCTS_AND_ATTENTION) / wall
    result = Stages({s.value: t for s, t in times.items()}, wall, Spread.of(unprofiled), share)
    kind = "cold" if cold else "warm"
    to = console()
    to.print(
        report.table(
            f"{kind} first token, {shape} tokens, {engine.model.name}",
            ("stage", "time", "share"),
            [[s.value, seconds(t), percent(t / wall)] for s, t in times.items()],
        )
    )
    to.print(
        report.table(
            "operators that take longest",
            ("operator", "", "time", "calls"),
            [[_label(o), stage_of(o).value, seconds(o.self_s), f"{o.calls}"] for o in operators[:SHOWN]],
        )
    )
    to.print(
        f"Matrix products and attention: {percent(share)} of {seconds(wall)} under the profiler; "
        f"without it {seconds(result.unprofiled.median)}."
    )
    settings = {"engine": engine, "shape": shape, "kind": kind, "repeats": repeats, "seed": seed}
    results = {
        "stages": result,
        "engines": facts,
        "operators": [{**asdict(o), "stage": stage_of(o).value} for o in operators],
    }
    if json_path is not None:
        passed = {"cold_equals_warm": True}
        report.write_json(
            json_path, report.report("profile", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        from .plots import plot_bars

        bars = {s.value: {"": 100 * t / wall} for s, t in times.items()}
        plot_bars(plot_path, bars, title=f"{kind} first token, {shape} tokens", label="% of the time")


def _measure(
    engine: EngineSettings, shape: Shape, repeats: int, seed: int, cold: bool
) -> tuple[list[Profile], list[float], dict[str, Any]]:
    """Profiles and unprofiled times, in turns."""
    hypic = Engine(engine, needed_context([(shape.segments, shape.tokens)], BESIDE), hypic=True)
    with report.progress(console(), repeats + 1, "starting the engine") as steps, running(hypic):
        writer = Writer(hypic.vocabulary, seed)

        def ask(*, fresh: bool) -> Ask:
            """A prompt whose documents are cached, or not."""
            prompt = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
            if not fresh:
                hypic.ask(Ask(prompt.marked(hypic.separator)))
                prompt = prompt.reordered(writer.order(shape.segments), writer.document(QUESTION))
            return Ask(prompt.marked(hypic.separator))

        steps.show("gate")
        checked = gate.require_cold_equals_warm(hypic, Ask(ask(fresh=True).tokens))
        gate.require_reuse(checked, shape.segments, shape.tokens, hypic.link())
        hypic.call(profiled, ask(fresh=cold))  # the profiler's own first time
        steps.done()
        profiles, unprofiled = [], []
        for repeat in range(repeats):
            steps.show(f"repeat {repeat + 1}")
            unprofiled.append(hypic.ask(ask(fresh=cold)).first_token_s)
            profiles.append(hypic.call(profiled, ask(fresh=cold)))
            if not cold:
                gate.require_reuse(profiles[-1].answer, shape.segments, shape.tokens, hypic.link())
            steps.done()
        return profiles, unprofiled, described(hypic)


def mean_operators(profiles: Sequence[Profile]) -> list[Operator]:
    """Time and calls of every operator per request, longest first."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in profiles:
        for operator in one.operators:
            total = sums[operator.name, operator.inside]
            total[0] += operator.self_s / len(profiles)
            total[1] += operator.calls / len(profiles)
    found = [Operator(name, inside, s, round(calls)) for (name, inside), (s, calls) in sums.items()]
    return sorted(found, key=lambda o: -o.self_s)


def _label(operator: Operator) -> str:
    name = operator.name if len(operator.name) <= 50 else operator.name[:47] + "..."
    return f"{name} in {operator.inside}" if operator.inside else name
