"""``steady``: documents in orders that never came before, for a long run, beside stock vLLM's prefix caching.

Users of a cache that keeps composed prompts saw 14 shuffled documents 4.48 times sooner, then 2.33, 1.32 and
1.07 times (LMCache issue 4663).  Records hold documents alone; this benchmark tests whether their reuse stays
level.  A run has five parts, compared by reuse, time to first token, and memory of the engine's process.

Requests come one at a time, the same to every engine, and engines take turns.  Every engine has the same
bytes for its caches: stock vLLM all of them, this plugin ``--kv-gib`` for vLLM's cache and the rest for its
pool.  The pool holds a share of the corpus, by bytes that two records of different lengths tell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness import engine_calls
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.fidelity import Distance, top
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import Steps, console, percent, size
from vllm_hypic.harness.settings import EngineSettings

from .engine_calls import resident_bytes, usage_of
from .lib import gate, report
from .lib.prompts import QUESTION, Writer
from .lib.report import check_outputs, output_options, seconds
from .lib.settings import SHORTEST, engine_options, stock_engines, stock_option
from .load import vocabulary_of
from .trace import Trace, TraceRequest, TraceSettings, generate

PARTS = 5
SIZED = (256, 1024)
"""Tokens of the two documents that tell the bytes of a record by its length."""
MOST_KL = 0.05
"""Limit, in nats, on the distance of a first token to a cold engine's.  Last bits of a record depend on the
documents that share its pass."""
MIB = 2**20


@dataclass(frozen=True)
class Part:
    """A part of an engine's run.  ``reuse``: prompt tokens that were not computed, of all; ``memory_mib``: of
    the engine's process, at the part's end."""

    reuse: float
    first_token_s: float
    p99_s: float
    memory_mib: float

    @staticmethod
    def of(answers: Sequence[Answer], memory_bytes: int) -> Part:
        """``first_token_s`` is the median."""
        first = [a.first_token_s for a in answers]
        reused, all_tokens = sum(a.cached for a in answers), sum(a.prompt_tokens for a in answers)
        return Part(reused / all_tokens, percentile(first, 50), percentile(first, 99), memory_bytes / MIB)


@dataclass(frozen=True)
class SteadyRun:
    """One engine, with caches of ``cache_bytes``, and of the plugin a pool that holds ``share`` of the
    corpus.  ``left``: distance of what the run left behind to a cold engine's answer."""

    share: float
    engine: str
    cache_bytes: int
    parts: tuple[Part, ...]
    left: Distance | None = None

    @property
    def steadiness(self) -> float:
        """Reuse in the last part, over that of the best part."""
        best = max(part.reuse for part in self.parts)
        return self.parts[-1].reuse / best if best else 1.0


@click.command(
    "steady",
    help="Documents in orders that never came before: reuse, first token and memory over a long run, beside "
    "stock vLLM's prefix caching.",
)
@engine_options(kv_gib=0.25)
@click.option("--documents", type=click.IntRange(8), default=200, show_default=True, help="In the corpus.")
@click.option("--zipf", type=click.FloatRange(0), default=1.0, show_default=True, help="Popularity.")
@click.option(
    "--median-tokens",
    type=click.IntRange(SHORTEST, 65536),
    default=256,
    show_default=True,
    help="Median length of documents.",
)
@click.option(
    "--per-request", type=click.Tuple([int, int]), default=(4, 8), show_default=True, help="From and to."
)
@click.option("--requests", type=click.IntRange(2 * PARTS), default=500, show_default=True)
@click.option(
    "--shares",
    type=Numbers(click.FloatRange(0.05, 4)),
    default="0.25,0.5,1",
    show_default=True,
    help="Parts of the corpus that the pool holds; a run for each.",
)
@click.option(
    "--disk-gib", type=click.FloatRange(0, 1024), default=0, show_default=True, help="Disk tier of ours."
)
@stock_option
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the trace.")
@output_options
@gate.reporting_failures
def steady(
    engine: EngineSettings,
    documents: int,
    zipf: float,
    median_tokens: int,
    per_request: tuple[int, int],
    requests: int,
    shares: tuple[float, ...],
    disk_gib: float,
    variants: tuple[dict[str, Any], ...],
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    drawn = TraceSettings(
        requests=2 * requests,
        documents=documents,
        zipf=zipf,
        median_tokens=median_tokens,
        min_tokens=SHORTEST,
        per_request=per_request,
        vocabulary=vocabulary_of(engine.model),
        seed=seed,
    )
    trace = new_orders(generate(drawn), requests)
    to = console()
    with report.progress(to, len(shares) * requests, "starting engines") as steps:
        found = measure(trace, engine, shares, disk_gib, variants, steps)
    _print(to, found, engine)
    if json_path is not None:
        settings = {"engine": engine, "trace": drawn, "requests": requests, "shares": shares}
        settings |= {"disk_gib": disk_gib, "stock": variants}
        passed = {"most_kl_behind_the_run": MOST_KL}
        results = {"runs": found, "steadiness": {f"{r.share:g} {r.engine}": r.steadiness for r in found}}
        report.write_json(
            json_path, report.report("steady", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        _plot(plot_path, found, engine)


def new_orders(trace: Trace, count: int) -> Trace:
    """Return the first ``count`` requests whose documents, in their order, no earlier request has.

    Raises ``click.UsageError`` if there are fewer.
    """
    first: dict[tuple[str, ...], TraceRequest] = {}
    for request in trace.requests:
        first.setdefault(request.documents, request)
    if len(first) < count:
        raise click.UsageError(
            f"{len(first)} orders never came before, {count} are asked for: more documents"
        )
    return replace(trace, requests=tuple(first.values())[:count])


def measure(
    trace: Trace,
    settings: EngineSettings,
    shares: Sequence[float],
    disk_gib: float,
    variants: Sequence[Mapping[str, Any]],
    steps: Steps,
) -> list[SteadyRun]:
    """Return the runs of all engines, share by share."""
    lengths = [len(content) for content in trace.documents.values()]
    context = trace.longest() + max(len(request.documents) for request in trace.requests) + 2
    corpus = _corpus_bytes(settings, lengths)
    found = []
    for share in shares:
        pool = int(corpus * share)
        with _engines(settings, context, pool, sum(lengths) // len(lengths), disk_gib, variants) as engines:
            found += _run(trace, engines, share, int(settings.kv_gib * 2**30) + pool, steps)
    return found


def _corpus_bytes(settings: EngineSettings, lengths: Sequence[int]) -> int:
    """Return the bytes of the records of documents with these ``lengths``."""
    engine = Engine(replace(settings, kv_gib=1.0), sum(SIZED) + QUESTION, hypic=True)
    held = []
    with running(engine):
        writer = Writer(engine.vocabulary, 0)
        for tokens in SIZED:
            engine.call(engine_calls.reset)
            prompt = writer.prompt(1, tokens, head=0, question=QUESTION)
            engine.ask(Ask(prompt.marked(engine.separator), logprobs=None))
            held.append(engine.call(usage_of).pool_bytes)
    a_token = (held[1] - held[0]) / (SIZED[1] - SIZED[0])
    return round(sum(lengths) * a_token + len(lengths) * (held[0] - SIZED[0] * a_token))


@contextmanager
def _engines(
    settings: EngineSettings,
    context: int,
    pool_bytes: int,
    expected_tokens: int,
    disk_gib: float,
    variants: Sequence[Mapping[str, Any]],
) -> Iterator[list[Engine]]:
    options = {"expected_segment_tokens": expected_tokens, **settings.hypic, "pool_bytes": pool_bytes}
    with ExitStack() as stack:
        if disk_gib:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-hypic-steady-"))
            tier = {"type": "disk", "path": folder, "bytes": int(disk_gib * 2**30)}
            options["store"] = {"tiers": [tier]}
        all_bytes = replace(settings, kv_gib=settings.kv_gib + pool_bytes / 2**30)
        engines = [Engine(replace(settings, hypic=options), context, hypic=True, enable_prefix_caching=True)]
        engines += stock_engines(all_bytes, context, variants)
        stack.enter_context(running(*engines))
        yield engines


def _run(
    trace: Trace, engines: Sequence[Engine], share: float, cache_bytes: int, steps: Steps
) -> list[SteadyRun]:
    hypic = engines[0]
    answers: dict[str, list[Answer]] = {engine.name: [] for engine in engines}
    parts: dict[str, list[Part]] = {engine.name: [] for engine in engines}
    ends = [len(trace.requests) * (i + 1) // PARTS for i in range(PARTS)]
    for number, request in enumerate(trace.requests, 1):
        steps.show(f"pool {share:g}, request {number}")
        for engine in (*engines[number % len(engines) :], *engines[: number % len(engines)]):
            answers[engine.name].append(engine.ask(Ask(_prompt(trace, request, engine), logprobs=None)))
        if number in ends:
            for engine in engines:
                part = Part.of(answers[engine.name], engine.call(resident_bytes))
                parts[engine.name].append(part)
                answers[engine.name].clear()
        steps.done()
    left = _left(hypic, _prompt(trace, trace.requests[-1], hypic))
    return [
        SteadyRun(share, engine.name, cache_bytes, tuple(parts[engine.name]), left if engine.hypic else None)
        for engine in engines
    ]


def _left(hypic: Engine, prompt: list[int]) -> Distance:
    """Return the distance of an answer from the records that a run left behind to a cold engine's answer.
    Raises :class:`GateFailed` for more than :data:`MOST_KL`."""
    hypic.call(engine_calls.forget_streams)
    behind = hypic.ask(Ask(prompt)).logprobs
    hypic.call(engine_calls.reset)
    cold = hypic.ask(Ask(prompt, logprobs_of=top(behind)))
    gate.require_fresh(cold, "a cold request")
    found = gate.checked_distance(behind, cold.logprobs, hypic.name)
    if found.kl > MOST_KL:
        raise gate.GateFailed(f"behind the run the first token is {found.kl:.3f} nats from a cold engine's")
    return found


def _prompt(trace: Trace, request: TraceRequest, engine: Engine) -> list[int]:
    prompt = trace.prompt(request, engine.separator if engine.hypic else None)
    assert isinstance(prompt, list), "a trace of token ids"
    return prompt


def _print(to: Console, found: Sequence[SteadyRun], settings: EngineSettings) -> None:
    rows = []
    for run in found:
        last = run.parts[-1]
        rows.append(
            (
                f"{run.share:g}",
                run.engine,
                size(run.cache_bytes),
                *(f"{part.reuse:.1%}" for part in run.parts),
                percent(run.steadiness),
                seconds(last.first_token_s),
                seconds(last.p99_s),
                f"{last.memory_mib - run.parts[0].memory_mib:+.0f}",
            )
        )
    parts = [f"part {i + 1}" for i in range(PARTS)]
    columns = ("pool", "engine", "caches", *parts, "last of best", "median", "p99", "MiB more")
    to.print(report.table(f"new orders, {settings.model.name}", columns, rows))
    to.print(
        "Parts: prompt tokens that were not computed. Times to the first token in the last part, one request "
        "at a time. MiB more: memory of the process since the end of the first part."
    )


def _plot(path: Path, found: Sequence[SteadyRun], settings: EngineSettings) -> None:
    from .plots import Axes, Line, plot_lines

    at = list(range(1, PARTS + 1))
    reuse, times = [], []
    for run in found:
        name = f"{run.engine}, pool {run.share:g}"
        reuse.append(Line(name, at, [100 * part.reuse for part in run.parts]))
        times.append(Line(name, at, [part.first_token_s for part in run.parts]))
    panels = [
        Axes("prompt tokens not computed", "part of the run", "%", reuse),
        Axes("time to first token, median", "part of the run", "seconds", times, log_y=True),
    ]
    plot_lines(path, panels, title=f"new orders, {settings.model.name}")
