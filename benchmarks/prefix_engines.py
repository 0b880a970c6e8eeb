"""``prefix-engines``: prompts that begin alike, asked of stock vLLM with prefix caching and of this plugin.

Requests come one at a time, the same to all engines, in the trace's order.  All engines have the same bytes
for their caches: stock vLLM uses them for one cache, this plugin in part for its pool.  Answers have one
token, or, with ``--answers``, the trace's length: given tokens, as a next turn has them in its prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.engine_calls import FORCING, Answer, Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.report import Steps, console
from vllm_hypic.harness.settings import EngineSettings

from .lib import gate, report
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import engine_options, stock_engines, stock_option
from .lib.stats import Spread
from .prefix_options import asked_traces, trace_options
from .prefix_traces import PrefixKind, Turn

_PIECE = 1 << 16
"""Tokens of a piece that are made at once."""


@dataclass(frozen=True)
class Side:
    """One engine on one trace.  ``hit_rate``: prompt tokens that were not computed, of all.  ``first_token``
    and ``p95_s`` count requests behind the first quarter, which fills the caches.  ``decode_s``: seconds of
    all tokens behind the first ones."""

    engine: str
    hit_rate: float
    first_token: Spread
    p95_s: float
    decode_s: float


@dataclass(frozen=True)
class EngineResult:
    """``best``: the stock engine with the lowest median time to the first token.  ``sooner``: that engine's
    times over the plugin's, request by request.  ``same``: requests that all engines answer with equal
    tokens, ``None`` for given answers."""

    trace: str
    requests: int
    tokens: int
    stock: tuple[Side, ...]
    hypic: Side
    best: str
    sooner: Spread
    same: int | None


@click.command(
    "prefix-engines",
    help="First token and hit rate of prompts with shared prefixes, beside stock vLLM's prefix caching.",
)
@engine_options(kv_gib=1.0)
@trace_options(requests=60, least=4)
@click.option(
    "--scale",
    type=click.FloatRange(1e-3, 1),
    default=0.2,
    show_default=True,
    help="Factor on the lengths of the trace.",
)
@click.option("--longest", type=click.IntRange(64, 1 << 20), default=8192, show_default=True)
@click.option(
    "--pool-share",
    type=click.FloatRange(0.05, 0.95),
    default=0.6,
    show_default=True,
    help="Share of --kv-gib for the plugin's pool; the rest is vLLM's cache.",
)
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=64, show_default=True)
@click.option("--answers", is_flag=True, help="Generate the trace's answers, not a single token.")
@stock_option
@output_options
@gate.reporting_failures
def prefix_engines(
    engine: EngineSettings,
    kinds: tuple[PrefixKind, ...],
    files: tuple[Path, ...],
    chunk: int,
    requests: int,
    seed: int,
    scale: float,
    longest: int,
    pool_share: float,
    page_tokens: int,
    answers: bool,
    variants: tuple[dict[str, Any], ...],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    traces = asked_traces(kinds, files, chunk, requests, seed)
    traces = {name: turns[:requests] for name, turns in traces.items()}
    with report.progress(console(), len(traces), "starting engines") as steps:
        found, facts = measure(
            traces, engine, variants, pool_share, page_tokens, scale, longest, steps, answers=answers
        )
    _print(found, engine)
    if json_path is not None:
        settings = {"engine": engine, "requests": requests, "seed": seed, "scale": scale, "longest": longest}
        settings |= {"pool_share": pool_share, "page_tokens": page_tokens, "answers": answers}
        settings["stock"] = variants
        results = {"traces": found, "engines": facts}
        report.write_json(json_path, report.report("prefix-engines", settings, results))
    if plot_path is not None:
        from .plots import plot_bars

        bars = {
            one.trace: {side.engine: side.first_token.median for side in (*one.stock, one.hypic)}
            for one in found
        }
        plot_bars(plot_path, bars, title=f"prefixes, {engine.model.name}", label="seconds to the first token")


def measure(
    traces: dict[str, list[Turn]],
    settings: EngineSettings,
    variants: Sequence[Mapping[str, Any]],
    pool_share: float,
    page_tokens: int,
    scale: float,
    longest: int,
    steps: Steps,
    *,
    answers: bool = False,
) -> tuple[list[EngineResult], dict[str, dict[str, object]]]:
    """Results by trace, and what the engines are.  ``scale``: lengths over those of the trace; prompts of
    more than ``longest`` tokens, with answers if these are generated, are left out."""
    pool = {
        **settings.hypic,
        "prefix": "sparse",
        "page_tokens": page_tokens,
        "pool_bytes": int(settings.kv_gib * pool_share * 2**30),
    }
    ours = replace(settings, kv_gib=settings.kv_gib * (1 - pool_share), hypic=pool)
    # The longest prompt must fit into what is left beside the pool.
    options: dict[str, Any] = {"max_model_len": longest + 8}
    options |= {"logits_processors": [FORCING]} if answers else {}
    hypic = Engine(ours, longest + 8, hypic=True, enable_prefix_caching=True, **options)
    engines = [*stock_engines(settings, longest + 8, variants, **options), hypic]
    found = []
    with running(*engines):
        words = np.asarray(hypic.vocabulary)
        for name, turns in traces.items():
            requests = [ask_of(turn, words, scale, answered=answers) for turn in turns]
            asked = [ask for ask in requests if len(ask.tokens) + len(ask.forced) <= longest]
            if not asked:
                raise click.UsageError(f"{name}: all prompts are longer than {longest} tokens: lower --scale")
            found.append(_measure(name, asked, engines, steps))
        facts = described(*engines)
    return found, facts


def ask_of(turn: Turn, words: np.ndarray, scale: float, *, answered: bool) -> Ask:
    """A request, with its answer or for one token."""
    prompt = tokens_of(turn, words, scale)
    if not answered:
        return Ask(prompt, logprobs=None)
    whole = tokens_of(replace(turn, prompt=sum(p.tokens for p in turn.pieces)), words, scale)
    return Ask(prompt, logprobs=0, forced=tuple(whole[len(prompt) :]) or (int(words[0]),))


def tokens_of(turn: Turn, words: np.ndarray, scale: float) -> list[int]:
    """Token ids of a prompt; a piece's are the same wherever its id stands, and salts have texts of their
    own."""
    ids: list[int] = []
    left = turn.prompt
    for piece in turn.pieces:
        count = max(1, round(min(left, piece.tokens) * scale))
        seed = zlib.crc32(f"{turn.salt} {piece.id}".encode())
        drawn = np.random.default_rng(seed).integers(0, len(words), min(_PIECE, max(count, 1)))
        ids += words[drawn[:count]].tolist()
        left -= piece.tokens
        if left <= 0:
            break
    return ids


def _measure(name: str, asked: Sequence[Ask], engines: Sequence[Engine], steps: Steps) -> EngineResult:
    """Return the result of one trace; the last of the ``engines`` is the plugin's."""
    answers: dict[str, list[Answer]] = {engine.name: [] for engine in engines}
    for i, ask in enumerate(asked):
        steps.show(f"{name} {i + 1}/{len(asked)}")
        # Engines take turns: a later engine finds the processor's caches as an earlier engine leaves them.
        first = i % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            answers[engine.name].append(engine.ask(ask))
    steps.done()
    counted = slice(len(asked) // 4, None)
    total = sum(len(ask.tokens) for ask in asked)

    def side(engine: str, found: list[Answer]) -> Side:
        first = [a.first_token_s for a in found[counted]]
        decode_s = sum(sum(a.decode_s) for a in found)
        return Side(
            engine, sum(a.cached for a in found) / total, Spread.of(first), percentile(first, 95), decode_s
        )

    *stock, hypic = (side(engine, found) for engine, found in answers.items())
    best = min(stock, key=lambda side: side.first_token.median)
    same = [len({answer.tokens for answer in each}) == 1 for each in zip(*answers.values(), strict=True)]
    return EngineResult(
        name,
        len(asked),
        total,
        tuple(stock),
        hypic,
        best.engine,
        best.first_token.over(hypic.first_token),
        None if asked[0].forced else sum(same),
    )


def _print(found: Sequence[EngineResult], engine: EngineSettings) -> None:
    rows = [
        (
            one.trace,
            side.engine,
            f"{one.requests}",
            f"{side.hit_rate:.1%}",
            seconds(side.first_token.median),
            seconds(side.p95_s),
            seconds(side.decode_s),
        )
        for one in found
        for side in (*one.stock, one.hypic)
    ]
    columns = ("trace", "engine", "requests", "hits", "median", "p95", "decode")
    title, to = f"prefixes, {engine.model.name}, {engine.kv_gib:g} GiB of caches each", console()
    to.print(report.table(title, columns, rows))
    to.print("Hits: prompt tokens that were not computed. Times to the first token, one request at a time.")
    for one in found:
        same = "" if one.same is None else f" Equal answers: {one.same / one.requests:.0%}."
        to.print(
            f"{one.trace}: the plugin answers {one.sooner.median:.2f} times sooner than {one.best}.{same}"
        )
