"""``prefix-engines``: prompts that begin alike, asked of stock vLLM with prefix caching and of this plugin.

Requests come one at a time, the same to both, in the trace's order.  Both have the same bytes for what is
cached: stock all of them, this plugin a part for its pool.  Of answers one token is generated, or, with
``--answers``, all that the trace has: given tokens, as a next turn has them in its prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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
from .lib.settings import engine_options
from .lib.stats import Spread
from .prefix_options import asked_traces, trace_options
from .prefix_traces import PrefixKind, Turn

_PIECE = 1 << 16
"""Tokens of a piece that are made at once."""


@dataclass(frozen=True)
class Side:
    """One engine on one trace.  ``hit_rate``: prompt tokens that were not computed, of all; first tokens of
    the requests behind the first quarter, which fills caches."""

    hit_rate: float
    first_token: Spread
    p95_s: float


@dataclass(frozen=True)
class EngineResult:
    """``same``: answers with equal tokens, ``None`` where they were given; ``sooner``: stock's time to the
    first token over ours, by request; ``decode_s``: stock's and ours, of all requests, behind the first
    token."""

    trace: str
    requests: int
    tokens: int
    stock: Side
    hypic: Side
    sooner: Spread
    decode_s: tuple[float, float]
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
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    traces = asked_traces(kinds, files, chunk, requests, seed)
    traces = {name: turns[:requests] for name, turns in traces.items()}
    with report.progress(console(), len(traces), "starting engines") as steps:
        found, facts = measure(
            traces, engine, pool_share, page_tokens, scale, longest, steps, answers=answers
        )
    _print(found, engine)
    if json_path is not None:
        settings = {"engine": engine, "requests": requests, "seed": seed, "scale": scale, "longest": longest}
        settings |= {"pool_share": pool_share, "page_tokens": page_tokens, "answers": answers}
        results = {"traces": found, "engines": facts}
        report.write_json(json_path, report.report("prefix-engines", settings, results))
    if plot_path is not None:
        from .plots import plot_bars

        bars = {
            one.trace: {"stock": one.stock.first_token.median, "hypic": one.hypic.first_token.median}
            for one in found
        }
        plot_bars(plot_path, bars, title=f"prefixes, {engine.model.name}", label="seconds to the first token")


def measure(
    traces: dict[str, list[Turn]],
    settings: EngineSettings,
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
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_model_len": longest + 8}
    options |= {"logits_processors": [FORCING]} if answers else {}
    stock = Engine(settings, longest + 8, hypic=False, **options)
    hypic = Engine(ours, longest + 8, hypic=True, **options)
    found = []
    with running(stock, hypic):
        words = np.asarray(stock.vocabulary)
        for name, turns in traces.items():
            requests = [ask_of(turn, words, scale, answered=answers) for turn in turns]
            asked = [ask for ask in requests if len(ask.tokens) + len(ask.forced) <= longest]
            if not asked:
                raise click.UsageError(f"{name}: all prompts are longer than {longest} tokens: lower --scale")
            found.append(_measure(name, asked, stock, hypic, steps))
        facts = described(stock, hypic)
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


def _measure(name: str, asked: Sequence[Ask], stock: Engine, hypic: Engine, steps: Steps) -> EngineResult:
    answers: dict[str, list[Answer]] = {stock.name: [], hypic.name: []}
    for i, ask in enumerate(asked):
        steps.show(f"{name} {i + 1}/{len(asked)}")
        # By turns: who comes second finds the machine's caches as the first left them.
        for engine in (stock, hypic) if i % 2 else (hypic, stock):
            answers[engine.name].append(engine.ask(ask))
    steps.done()
    counted = slice(len(asked) // 4, None)
    total = sum(len(ask.tokens) for ask in asked)

    def side(found: list[Answer]) -> Side:
        first = [a.first_token_s for a in found[counted]]
        return Side(sum(a.cached for a in found) / total, Spread.of(first), percentile(first, 95))

    theirs, ours = answers[stock.name], answers[hypic.name]
    return EngineResult(
        name,
        len(asked),
        total,
        side(theirs),
        side(ours),
        Spread.of([a.first_token_s / b.first_token_s for a, b in zip(theirs, ours, strict=True)][counted]),
        (sum(sum(a.decode_s) for a in theirs), sum(sum(a.decode_s) for a in ours)),
        None if asked[0].forced else sum(a.tokens == b.tokens for a, b in zip(theirs, ours, strict=True)),
    )


def _print(found: Sequence[EngineResult], engine: EngineSettings) -> None:
    rows = [
        (
            one.trace,
            f"{one.requests}",
            f"{one.stock.hit_rate:.1%}",
            f"{one.hypic.hit_rate:.1%}",
            seconds(one.stock.first_token.median),
            seconds(one.hypic.first_token.median),
            f"{one.stock.first_token.median / one.hypic.first_token.median:.2f}",
            seconds(one.stock.p95_s),
            seconds(one.hypic.p95_s),
            "given" if one.same is None else f"{one.same / one.requests:.0%}",
        )
        for one in found
    ]
    columns = ("", "requests", "hits", "ours", "median", "ours", "sooner", "p95", "ours", "same")
    title, to = f"prefixes, {engine.model.name}, {engine.kv_gib:g} GiB of caches each", console()
    to.print(report.table(title, columns, rows))
    to.print("Hits: prompt tokens that were not computed. Times to the first token, one request at a time.")
