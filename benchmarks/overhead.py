"""``overhead``: what the plugin costs where it cannot help.

* plain requests (no separators) with and without the plugin: first token and decode; none of the plugin's
  operators may run, and answers must be bit-identical;
* cold requests (nothing cached) against stock vLLM;
* decode over cached documents against stock vLLM's decode at the same context.

Ratios are hypic over stock, repeat by repeat, and engines swap turns from repeat to repeat.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import Steps, console
from vllm_hypic.harness.settings import EngineSettings

from .engine_calls import hypic_calls
from .lib import gate, report
from .lib.prompts import BESIDE, HEAD, QUESTION, Shape, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Spread
from .options import Shapes, needed_context, repeat_options

GRID = "1x4096,4x2048,4x1024,8x512,16x1024,16x256,16x128"
DECODE_SEGMENT = 1024


@dataclass(frozen=True)
class Pair:
    """The same work with both engines, in seconds; ``ratio`` is hypic over stock."""

    what: str
    stock: Spread
    hypic: Spread
    ratio: Spread

    @staticmethod
    def of(what: str, stock: Sequence[float], hypic: Sequence[float]) -> Pair:
        with_stock, with_hypic = Spread.of(stock), Spread.of(hypic)
        return Pair(what, with_stock, with_hypic, with_hypic.over(with_stock))


@dataclass(frozen=True)
class Overheads:
    """Everything that was measured."""

    plain: list[Pair]
    plain_decode: list[Pair]
    plain_operators: dict[str, int]
    """Calls of the plugin's operators while plain requests ran."""
    cold: list[Pair]
    decode: list[Pair]


@click.command(help="Plain requests with and without the plugin, cold against stock, decode over documents.")
@engine_options()
@repeat_options
@click.option(
    "--lengths",
    type=Numbers(click.IntRange(16, 131072)),
    default="512,2048,8192",
    show_default=True,
    help="Lengths of plain prompts.",
)
@click.option("--grid", type=Shapes(), default=GRID, show_default=True, help="Shapes of cold requests.")
@click.option(
    "--decode-context",
    type=click.IntRange(SHORTEST, 131072),
    default=16384,
    show_default=True,
    help="Tokens of cached documents in the decode comparison.",
)
@click.option(
    "--decode-tokens",
    type=click.IntRange(2, 4096),
    default=32,
    show_default=True,
    help="Tokens generated where decode is timed.",
)
@output_options
@gate.reporting_failures
def overhead(
    engine: EngineSettings,
    lengths: tuple[int, ...],
    grid: tuple[tuple[int, int], ...],
    decode_context: int,
    decode_tokens: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    documents = decode_shape(decode_context)
    shapes = [Shape(*shape) for shape in grid]
    result, facts = _measure(engine, lengths, shapes, documents, decode_tokens, repeats, seed)
    to = console()
    title = f"hypic over stock vLLM, {engine.model.name}"
    to.print(report.table(title, ("", "stock", "hypic", "ratio", "min", "max"), _rows(result)))
    to.print(
        "Gate passed: plain answers are bit-identical with and without the plugin, none of its operators ran "
        "for them; cold and warm answers are bit-identical."
    )
    if json_path is not None:
        settings = {
            "engine": engine,
            "lengths": lengths,
            "grid": shapes,
            "decode": {"shape": documents, "tokens": decode_tokens},
            "repeats": repeats,
            "seed": seed,
        }
        passed = {
            "plain_equals_stock": True,
            "plain_operators": result.plain_operators,
            "cold_equals_warm": True,
        }
        results = {"overheads": result, "engines": facts}
        report.write_json(
            json_path, report.report("overhead", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        from .plots import plot_bars

        pairs = [*result.plain, *result.plain_decode, *result.cold, *result.decode]
        bars = {p.what: {"": p.ratio.median} for p in pairs}
        plot_bars(plot_path, bars, title=title, label="ratio", line_at=1.0)


def decode_shape(context: int) -> Shape:
    """Documents of about ``DECODE_SEGMENT`` tokens that make up ``context``."""
    segments = max(1, round(context / DECODE_SEGMENT))
    return Shape(segments, context // segments)


def _measure(
    engine: EngineSettings,
    lengths: Sequence[int],
    shapes: Sequence[Shape],
    documents: Shape,
    decode_tokens: int,
    repeats: int,
    seed: int,
) -> tuple[Overheads, dict[str, Any]]:
    longest = [(1, n) for n in lengths] + [(s.segments, s.tokens) for s in (*shapes, documents)]
    context = needed_context(longest, BESIDE + decode_tokens)
    stock, hypic = Engine(engine, context, hypic=False), Engine(engine, context, hypic=True)
    total = (len(lengths) + len(shapes) + 1) * (repeats + 1)
    with report.progress(console(), total, "starting engines") as steps, running(stock, hypic):
        bench = _Bench(stock, hypic, Writer(hypic.vocabulary, seed), repeats, steps)
        before = hypic.call(hypic_calls)
        plain = [bench.plain(n, decode_tokens) for n in lengths]
        after = hypic.call(hypic_calls)
        ran = {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}
        if ran:
            raise gate.GateFailed(f"plain requests ran operators of the plugin: {ran}")
        result = Overheads(
            plain=[first for first, _ in plain],
            plain_decode=[decode for _, decode in plain],
            plain_operators=ran,
            cold=[bench.cold(shape) for shape in shapes],
            decode=[bench.decode(documents, decode_tokens)],
        )
        if not hypic.call(hypic_calls):
            raise gate.GateFailed("the plugin's operators are not counted: their absence proves nothing")
        return result, described(stock, hypic)


class _Bench:
    """Both engines and what a measurement needs beside them."""

    def __init__(self, stock: Engine, hypic: Engine, writer: Writer, repeats: int, steps: Steps) -> None:
        self.stock, self.hypic, self.writer, self.repeats = stock, hypic, writer, repeats
        self.steps = steps

    def plain(self, length: int, decode_tokens: int) -> tuple[Pair, Pair]:
        """First token and decode of prompts without separators."""

        def turn() -> tuple[Callable[[], Answer], Callable[[], Answer]]:
            ask = Ask(list(self.writer.document(length)), max_tokens=decode_tokens)
            return lambda: self.stock.ask(ask), lambda: self.hypic.ask(ask)

        def check(stock: Answer, hypic: Answer) -> None:
            gate.require_fresh(stock, "stock vLLM")
            gate.require_fresh(hypic, "a plain request")
            gate.require_same("plain answers with and without the plugin", stock, hypic)

        pairs = self._repeat(f"plain, {length}", turn, check)
        return (
            Pair.of(f"plain, {length}, first token", *_first(pairs)),
            Pair.of(f"plain, {length}, decode", *_decode(pairs)),
        )

    def cold(self, shape: Shape) -> Pair:
        """Requests of which nothing is cached."""
        prompt = self.writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
        marked = prompt.marked(self.hypic.separator)
        warm = gate.require_cold_equals_warm(self.hypic, Ask(marked))
        gate.require_reuse(warm, shape.segments, shape.tokens, self.hypic.link())

        def turn() -> tuple[Callable[[], Answer], Callable[[], Answer]]:
            prompt = self.writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
            marked = Ask(prompt.marked(self.hypic.separator))
            return lambda: self.stock.ask(Ask(prompt.plain())), lambda: self.hypic.ask(marked)

        def check(stock: Answer, hypic: Answer) -> None:
            gate.require_fresh(stock, "stock vLLM")
            gate.require_fresh(hypic, "a cold request")

        pairs = self._repeat(f"cold, {shape}", turn, check)
        return Pair.of(f"cold, {shape}, first token", *_first(pairs))

    def decode(self, shape: Shape, tokens: int) -> Pair:
        """Decode with all documents cached, against stock decode of the same prompt."""

        def turn() -> tuple[Callable[[], Answer], Callable[[], Answer]]:
            first = self.writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
            self.hypic.ask(Ask(first.marked(self.hypic.separator)))
            again = first.reordered(self.writer.order(shape.segments), self.writer.document(QUESTION))
            marked = Ask(again.marked(self.hypic.separator), max_tokens=tokens)
            plain = Ask(again.plain(), max_tokens=tokens)
            return lambda: self.stock.ask(plain), lambda: self.hypic.ask(marked)

        def check(stock: Answer, hypic: Answer) -> None:
            gate.require_reuse(hypic, shape.segments, shape.tokens, self.hypic.link())

        pairs = self._repeat(f"decode, {shape}", turn, check)
        return Pair.of(f"decode over {shape} cached", *_decode(pairs))

    def _repeat(
        self,
        what: str,
        turn: Callable[[], tuple[Callable[[], Answer], Callable[[], Answer]]],
        check: Callable[[Answer, Answer], None],
    ) -> list[tuple[Answer, Answer]]:
        """Answers of stock and hypic, the first turn dropped as a warm-up."""
        found = []
        for repeat in range(self.repeats + 1):
            self.steps.show(what)
            stock, hypic = turn()
            if repeat % 2:
                with_hypic, with_stock = hypic(), stock()
            else:
                with_stock, with_hypic = stock(), hypic()
            check(with_stock, with_hypic)
            found.append((with_stock, with_hypic))
            self.steps.done()
        return found[1:]


def _first(pairs: Sequence[tuple[Answer, Answer]]) -> tuple[list[float], list[float]]:
    return [stock.first_token_s for stock, _ in pairs], [hypic.first_token_s for _, hypic in pairs]


def _decode(pairs: Sequence[tuple[Answer, Answer]]) -> tuple[list[float], list[float]]:
    """Median seconds a token of every request."""
    return (
        [statistics.median(stock.decode_s) for stock, _ in pairs],
        [statistics.median(hypic.decode_s) for _, hypic in pairs],
    )


def _rows(result: Overheads) -> list[list[str]]:
    return [
        [
            pair.what,
            seconds(pair.stock.median),
            seconds(pair.hypic.median),
            *(f"{x:.3f}" for x in (pair.ratio.median, pair.ratio.min, pair.ratio.max)),
        ]
        for pair in (*result.plain, *result.plain_decode, *result.cold, *result.decode)
    ]
