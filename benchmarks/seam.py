"""``seam``: time and fidelity over the seam window ``w``, with the ``naive`` method as the contrast.

Every repeat draws fresh documents. Stock vLLM computes the prompt in full; every variant then answers the
same prompt with its documents cached in another order. The first token's distribution is compared with stock
vLLM's. How far stock vLLM is from itself when it cuts the same prompt into other chunks is the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.fidelity import Distance, distance, top
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import console, percent
from vllm_hypic.harness.settings import EngineSettings
from vllm_hypic.primitives.options import LINK, SEAM

from .lib import gate, report
from .lib.prompts import BESIDE, HEAD, QUESTION, Shape, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Fidelity, Spread
from .options import needed_context, repeat_options

NOISE_CHUNK = 1024


@dataclass(frozen=True)
class Variant:
    """One way to answer a request; ``extra`` are its options."""

    name: str
    extra: dict[str, Any]
    window: int | None = None
    """``w``, for plots."""


@dataclass(frozen=True)
class SeamResult:
    """What was measured of one variant."""

    name: str
    window: int | None
    first_token: Spread | None
    speedup: Spread | None
    """Stock over this one."""
    recomputed: int | None
    """Tokens of the prompt that were computed."""
    fidelity: Fidelity | None


@click.command(help="Time and fidelity over the seam window, next to stock vLLM's own noise.")
@engine_options()
@repeat_options
@click.option("--segments", type=click.IntRange(2, 256), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=1024, show_default=True)
@click.option("--windows", type=Numbers(click.IntRange(0, 1024)), default="0,4,8,16,32", show_default=True)
@click.option(
    "--naive-window", type=click.IntRange(0, 1024), default=8, show_default=True, help="Window of `naive`."
)
@click.option(
    "--noise-chunk",
    type=click.IntRange(64, 1 << 20),
    default=NOISE_CHUNK,
    show_default=True,
    help="max_num_batched_tokens of the stock engine that shows the noise.",
)
@output_options
@gate.reporting_failures
def seam(
    engine: EngineSettings,
    segments: int,
    tokens: int,
    windows: tuple[int, ...],
    naive_window: int,
    noise_chunk: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    if 2 * max(*windows, naive_window) + SHORTEST // 2 > tokens:
        raise click.UsageError(
            f"--tokens {tokens}: too short for a window of {max(*windows, naive_window)} on either side"
        )
    shape = Shape(segments, tokens)
    variants = [Variant(f"hypic, w = {w}", {SEAM: w}, w) for w in windows]
    variants.append(Variant(f"naive, w = {naive_window}", {LINK: "naive", SEAM: naive_window}))
    measured, facts, exact = _measure(engine, shape, variants, noise_chunk, repeats, seed)
    to = console()
    to.print(_table(f"{shape} tokens, {engine.model.name}", measured))
    exactly = "bit-identical to" if exact else "not bit-identical to"
    to.print(
        "Gate passed: cold and warm answers are bit-identical for every window. "
        f"With link full, answers are {exactly} stock vLLM's."
    )
    if json_path is not None:
        settings = {
            "engine": engine,
            "shape": shape,
            "windows": windows,
            "naive_window": naive_window,
            "noise_chunk": noise_chunk,
            "repeats": repeats,
            "seed": seed,
        }
        passed = {"cold_equals_warm": True, "link_full_equals_stock": exact}
        results = {"rows": measured, "engines": facts}
        report.write_json(
            json_path, report.report("seam", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        _plot(plot_path, measured, str(shape))


def _measure(
    engine: EngineSettings,
    shape: Shape,
    variants: Sequence[Variant],
    noise_chunk: int,
    repeats: int,
    seed: int,
) -> tuple[list[SeamResult], dict[str, Any], bool]:
    """Rows of stock, its noise and the variants; what the engines are; whether link full is exact."""
    context = needed_context([(shape.segments, shape.tokens)], BESIDE)
    stock, hypic = Engine(engine, context, hypic=False), Engine(engine, context, hypic=True)
    noise = Engine(engine, context, hypic=False, name="noise", max_num_batched_tokens=noise_chunk)
    names = [*(v.name for v in variants), "stock", "noise"]
    times: dict[str, list[float]] = {name: [] for name in names}
    distances: dict[str, list[Distance]] = {name: [] for name in names}
    recomputed: dict[str, int] = {}
    with (
        report.progress(console(), repeats + 1, "starting engines") as steps,
        running(stock, noise, hypic),
    ):
        writer = Writer(hypic.vocabulary, seed)
        steps.show("gate")
        exact = _gate(stock, hypic, shape, variants, writer)
        steps.done()
        for repeat in range(repeats):
            steps.show(f"repeat {repeat + 1}")
            first = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
            again = first.reordered(writer.order(shape.segments), writer.document(QUESTION))
            reference = stock.ask(Ask(again.plain()))
            gate.require_fresh(reference, "stock vLLM")
            times["stock"].append(reference.first_token_s)
            wanted = top(reference.logprobs)
            other = noise.ask(Ask(again.plain(), logprobs_of=wanted))
            distances["noise"].append(distance(reference.logprobs, other.logprobs))
            # Every variant takes every turn once in a while.
            turn = repeat % len(variants)
            for variant in [*variants[turn:], *variants[:turn]]:
                hypic.ask(Ask(first.marked(hypic.separator), extra=variant.extra))
                ask = Ask(again.marked(hypic.separator), logprobs_of=wanted, extra=variant.extra)
                warm = hypic.ask(ask)
                gate.require_reuse(warm, shape.segments, shape.tokens, hypic.link(variant.extra))
                times[variant.name].append(warm.first_token_s)
                recomputed[variant.name] = len(again) - warm.cached
                distances[variant.name].append(
                    gate.checked_distance(reference.logprobs, warm.logprobs, variant.name)
                )
            steps.done()
        facts = described(stock, noise, hypic)
    base = Spread.of(times["stock"])
    rows = [
        SeamResult("stock vLLM", None, base, None, reference.prompt_tokens, None),
        SeamResult(
            f"stock vLLM, chunks of {noise_chunk}", None, None, None, None, Fidelity.of(distances["noise"])
        ),
    ]
    for v in variants:
        spread = Spread.of(times[v.name])
        rows.append(
            SeamResult(
                v.name,
                v.window,
                spread,
                base.over(spread),
                recomputed[v.name],
                Fidelity.of(distances[v.name]),
            )
        )
    return rows, facts, exact


def _gate(stock: Engine, hypic: Engine, shape: Shape, variants: Sequence[Variant], writer: Writer) -> bool:
    """Warm equals cold for every variant; returns whether ``full`` equals stock vLLM."""
    prompt = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
    marked = prompt.marked(hypic.separator)
    for variant in variants:
        warm = gate.require_cold_equals_warm(hypic, Ask(marked, extra=variant.extra))
        gate.require_reuse(warm, shape.segments, shape.tokens, hypic.link(variant.extra))
    full = hypic.ask(Ask(marked, extra={LINK: "full"}))
    reference = stock.ask(Ask(prompt.plain()))
    gate.require_close(gate.checked_distance(reference.logprobs, full.logprobs, "link full"))
    return full.tokens == reference.tokens and full.logprobs == reference.logprobs


def _table(title: str, measured: Sequence[SeamResult]) -> Any:
    columns = ("", "median", "min", "max", "x stock", "computed", "max |d|", "mean |d|", "KL", "argmax")
    rows = []
    for row in measured:
        t, f = row.first_token, row.fidelity
        rows.append(
            [
                row.name,
                *(["", "", ""] if t is None else [seconds(x) for x in (t.median, t.min, t.max)]),
                "" if row.speedup is None else f"{row.speedup.median:.2f}",
                "" if row.recomputed is None else str(row.recomputed),
                *(
                    ["", "", "", ""]
                    if f is None
                    else [f"{f.max_abs:.3g}", f"{f.mean_abs:.3g}", f"{f.kl:.2g}", percent(f.agreement)]
                ),
            ]
        )
    return report.table(title, columns, rows)


def _plot(path: Path, measured: Sequence[SeamResult], shape: str) -> None:
    from .lib.report import COLOURS
    from .plots import Axes, Line, plot_lines

    windows = [r for r in measured if r.window is not None]
    x = [float(r.window or 0) for r in windows]
    spreads = [r.first_token for r in windows if r.first_token is not None]
    time = Line(
        "hypic, warm",
        x,
        [s.median for s in spreads],
        [s.min for s in spreads],
        [s.max for s in spreads],
        COLOURS["warm"],
    )
    kl = Line("hypic", x, [r.fidelity.kl for r in windows if r.fidelity], colour=COLOURS["warm"])
    others = {r.name: r.fidelity.kl for r in measured if r.window is None and r.fidelity is not None}
    plot_lines(
        path,
        [
            Axes("time to first token", "seam window", "seconds", [time]),
            Axes(
                "first token against stock vLLM",
                "seam window",
                "KL, nats",
                [kl],
                log_y=True,
                horizontal=others,
            ),
        ],
        title=f"{shape} tokens",
    )
