"""``records``: bytes of a segment's record, with and without the transitions of dead heads, and what leaving
them out does to answers.

One engine per bound of ``dead_transition``; at 0 every transition is kept: the reference of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.fidelity import Distance, top
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import console, size
from vllm_hypic.harness.settings import EngineSettings

from .engine_calls import RecordBytes, records_held
from .lib import gate, report
from .lib.prompts import BESIDE, QUESTION, Writer
from .lib.report import check_outputs, output_options
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Fidelity
from .options import needed_context

KEEP_ALL = 0.0
SEGMENTS = 4


@dataclass(frozen=True)
class Kept:
    """One bound, one length: the mean record, and answers against those with all transitions."""

    bound: float
    tokens: int
    record: RecordBytes
    fidelity: Fidelity


@click.command(help="Bytes of a segment's record over its length, and bytes that dead heads save.")
@engine_options()
@click.option(
    "--lengths",
    type=Numbers(click.IntRange(SHORTEST, 65536)),
    default="256,1024,4096",
    show_default=True,
    help="Lengths of segments.",
)
@click.option(
    "--bounds",
    type=Numbers(click.FloatRange(0, 1, min_open=True, max_open=True)),
    default="2.98e-8,1e-6,1e-4",
    show_default=True,
    help="Values of dead_transition, beside 0.",
)
@click.option("--prompts", type=click.IntRange(1, 1000), default=3, show_default=True, help="Per length.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the documents.")
@output_options
@gate.reporting_failures
def records(
    engine: EngineSettings,
    lengths: tuple[int, ...],
    bounds: tuple[float, ...],
    prompts: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    found = _measure(engine, lengths, (KEEP_ALL, *bounds), prompts, seed)
    to = console()
    title = f"a segment's record, {engine.model.name}"
    columns = ("tokens", "dead_transition", "live heads", "bytes", "of all", "max |dlogprob|", "KL")
    to.print(report.table(title, columns, [_row(kept, found) for kept in found]))
    if json_path is not None:
        settings = {"engine": engine, "lengths": lengths, "prompts": prompts, "seed": seed}
        passed = {"cold_equals_warm": True}
        report.write_json(
            json_path,
            report.report("records", settings, {"records": found}, gate=passed, threads=engine.threads),
        )
    if plot_path is not None:
        from .plots import plot_bars

        bars: dict[str, dict[str, float]] = {
            f"{k.tokens}, {k.bound:g}": {
                "K and V": k.record.pages / 2**20,
                "states": k.record.states / 2**20,
                "transitions": k.record.transitions / 2**20,
            }
            for k in found
        }
        plot_bars(plot_path, bars, title=title, label="MiB", stacked=True)


def _measure(
    engine: EngineSettings, lengths: tuple[int, ...], bounds: tuple[float, ...], prompts: int, seed: int
) -> list[Kept]:
    context = needed_context([(SEGMENTS, n) for n in lengths], BESIDE)
    answers: dict[tuple[int, int], dict[int, float]] = {}
    found = []
    with report.progress(console(), len(bounds), "starting") as steps:
        for bound in bounds:
            steps.show(f"dead_transition {bound:g}")
            options = {"expected_live_heads": 1.0, **engine.hypic, "dead_transition": bound}
            one = Engine(replace(engine, hypic=options), context, hypic=True)
            with running(one):
                writer = Writer(one.vocabulary, seed)
                for tokens in lengths:
                    distances: list[Distance] = []
                    held: list[RecordBytes] = []
                    for number in range(prompts):
                        # No leading segment: its record has no transition.
                        prompt = writer.prompt(SEGMENTS, tokens, head=0, question=QUESTION)
                        marked = prompt.marked(one.separator)
                        warm = gate.require_cold_equals_warm(one, Ask(marked))
                        gate.require_reuse(warm, SEGMENTS, tokens, one.link())
                        held += one.call(records_held)
                        key = tokens, number
                        if bound == KEEP_ALL:
                            answers[key] = warm.logprobs
                        wanted = top(answers[key])
                        again = one.ask(Ask(marked, logprobs_of=wanted)).logprobs
                        distances.append(gate.checked_distance(answers[key], again, one.name))
                    if not held:
                        raise gate.GateFailed(
                            "this model has no linear-attention layers, so no heads can be dead"
                        )
                    found.append(Kept(bound, tokens, RecordBytes.mean(held), Fidelity.of(distances)))
            steps.done()
    return found


def _row(kept: Kept, found: list[Kept]) -> tuple[str, ...]:
    [whole] = [k for k in found if k.tokens == kept.tokens and k.bound == KEEP_ALL]
    record = kept.record
    return (
        str(kept.tokens),
        f"{kept.bound:g}" if kept.bound else "keep all",
        f"{record.live_heads:.0%}",
        size(record.total),
        f"{record.total / whole.record.total:.0%}",
        f"{kept.fidelity.max_abs_worst:.2g}",
        f"{kept.fidelity.kl_worst:.1e}",
    )
