"""``load``: a RAG trace against ``vllm serve``, with this plugin and stock with prefix caching.

Stock vLLM runs with its defaults, or as several servers with ``--stock``; ratios are over the best of them.

Measures the time to first token, from the scheduled arrival on, over request rates; or searches each
server's *sustainable rate*: the highest at which a percentile of it stays below a limit.  Requests are sent
and timed by ``vllm bench serve`` (``bench_serve.py``), a process for each measurement.

What makes the two comparable:

* The same requests: same documents, order, questions and lengths of answers (``ignore_eos``).  Only
  separators differ.  Prompts are token ids by default, so neither server tokenises anything.
* The same memory: ``--cache-gib`` for everything that is cached.  Stock vLLM has all of it for its prefix
  cache; with the plugin the pool of records takes ``--pool-share`` of it.  By default the pool holds about
  half of the default corpus on the default model: documents are evicted, and computed again, all the time.
* The same state: the first requests fill the caches and are not counted.  Each measurement then takes the
  *next* requests of the trace; sending the same ones again would let a prefix cache find whole prompts.
* One server works at a time, and they take turns: an idle vLLM server takes next to no time.
* vLLM's defaults for everything else, compiled models among it.

With 60 requests in a measurement the 99th percentile is the slowest of them: strict, and decided early:
in a search a measurement ends once more requests than allowed have waited longer than the limit.  More
requests, or the 90th percentile, are steadier.  The ratio's range says how far apart the rates are that
were and were not sustained; how much luck there is in the trace, other seeds say.

The limit of 10 s is a few times what stock vLLM needs for one prompt of the default trace on a small
machine.  Shorter limits are harder on the server with the longer prefills: with a limit close to the time
of one prefill it sustains nothing, and the ratio says nothing.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.numbers import Numbers
from vllm_hypic.harness.report import percent
from vllm_hypic.harness.settings import with_options
from vllm_hypic.primitives.tokens import PrimitiveTexts

from . import trace as traces
from .bench_serve import BenchError, End
from .client import Client, ClientError
from .lib import report
from .lib.gate import reporting_failures
from .lib.report import seconds
from .lib.serving import ServerError
from .lib.settings import Served, served_options
from .rates import LoadResult, LoadSettings, Measurement, RatePoint, connect
from .servers import HYPIC, STOCK, ServeSettings, Spec, serving, token_counter
from .trace import Trace, TraceError, TraceSettings

SPARE_IDS = 64
"""Ids at the end of a vocabulary that prompts do not use: special tokens, padding."""
LARGEST_ID = 50_000


# -- the command -------------------------------------------------------------------------------------


class Named(click.ParamType):
    """``name=value``."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, rest = value.partition("=")
        if not (name and equals and rest):
            self.fail(f"{value!r}: expected name=value, like hypic=http://127.0.0.1:8000", param, ctx)
        return name, rest


TRACE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
POSITIVE = click.IntRange(1)


def _trace_options(command: Any) -> Any:
    """Options of a generated trace, one for each field of :class:`TraceSettings` but three."""
    d, pair = TraceSettings(), click.Tuple([int, int])
    options: list[tuple[str, Any, Any, str]] = [
        ("--documents", POSITIVE, d.documents, "Documents in the corpus."),
        ("--zipf", click.FloatRange(0), d.zipf, "Exponent of document popularity; 0: equal."),
        ("--lengths", click.Choice(["lognormal", "pareto"]), d.lengths, "Distribution of document lengths."),
        ("--median-tokens", POSITIVE, d.median_tokens, "Median length of documents."),
        ("--tail", click.FloatRange(0), d.tail, "Log-normal: sigma; Pareto: 1 / alpha."),
        ("--min-tokens", POSITIVE, d.min_tokens, "Shortest document."),
        ("--max-tokens", POSITIVE, d.max_tokens, "Longest document."),
        ("--per-request", pair, d.per_request, "Documents in a request, from and to."),
        ("--order", click.Choice(["shuffled", "popular-first"]), d.order, "Order of documents in a request."),
        ("--system-tokens", POSITIVE, d.system_tokens, "Length of the system prompt."),
        ("--question-tokens", POSITIVE, d.question_tokens, "Length of a question."),
        ("--output-tokens", pair, d.output_tokens, "Length of an answer, from and to."),
        ("--form", click.Choice(["tokens", "text"]), d.form, "Prompts as token ids or as text."),
        ("--seed", click.IntRange(0), d.seed, "Seed of the trace."),
    ]
    return with_options(
        command,
        *(
            click.option(flag, type=kind, default=default, show_default=True, help=text)
            for flag, kind, default, text in options
        ),
    )


STOCK_ARGUMENTS = click.option(
    "--stock",
    multiple=True,
    default=("",),
    help='A stock server with more arguments, such as "--prefix-match-unit 16"; repeatable.',
)
TRACE_OPTIONS = {f.name for f in fields(TraceSettings)} - {"requests", "rate", "vocabulary"}


@click.command(help="A RAG trace against vllm serve: first token over request rates, sustainable rates.")
@served_options(timeout_s=600.0)
@click.option(
    "--cache-gib",
    type=click.FloatRange(0.05, 4096),
    default=4.0,
    show_default=True,
    help="GiB of each server for all caches.",
)
@click.option(
    "--pool-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="Share of --cache-gib for the plugin's pool.",
)
@STOCK_ARGUMENTS
@click.option(
    "--url",
    "urls",
    type=Named(),
    multiple=True,
    help="Measure name=URL instead of starting servers; repeatable.",
)
@click.option(
    "--separator",
    "separators",
    type=Named(),
    multiple=True,
    help="name=TEXT: separator of the --url server of this name; default for hypic: the plugin's.",
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Environment variable with the API key of --url servers.",
)
@click.option(
    "--trace", "trace_path", type=TRACE_FILE, help="Send this trace (JSONL) instead of generating one."
)
@click.option("--write-trace", type=NEW_FILE, help="Write the generated trace here and measure nothing.")
@click.option("--vocabulary", type=click.IntRange(5), help="Size of the vocabulary; default: the model's.")
@_trace_options
@click.option(
    "--requests", type=POSITIVE, default=60, show_default=True, help="Counted requests of each measurement."
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=60,
    show_default=True,
    help="Requests that fill the caches first; not counted.",
)
@click.option(
    "--warm-up-at-once", type=POSITIVE, default=4, show_default=True, help="Warm-up requests at a time."
)
@click.option(
    "--rates",
    type=Numbers(click.FloatRange(0, min_open=True)),
    default=(),
    help="Measure these rates (0.1,0.2,0.4) instead of searching.",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Limit of the time to first token, seconds.",
)
@click.option(
    "--percentile",
    type=click.IntRange(1, 100),
    default=99,
    show_default=True,
    help="Percentile of the times that must keep the limit.",
)
@click.option(
    "--precision",
    type=click.FloatRange(1.01, 4),
    default=1.1,
    show_default=True,
    help="Search until the lowest failed rate is within this factor of the highest sustained rate.",
)
@click.option(
    "--probes", type=POSITIVE, default=9, show_default=True, help="Limit on the rates for each server."
)
@click.option(
    "--start-rate",
    type=click.FloatRange(0, min_open=True),
    help="First rate of the search; default: half of the warm-up's rate.",
)
@click.option(
    "--finish", is_flag=True, help="In a search, also complete measurements that miss the limit early."
)
@report.output_options
@click.pass_context
@reporting_failures
def load(
    context: click.Context,
    /,
    *,
    served: Served,
    cache_gib: float,
    pool_share: float,
    stock: tuple[str, ...],
    urls: tuple[tuple[str, str], ...],
    separators: tuple[tuple[str, str], ...],
    api_key_env: str,
    trace_path: Path | None,
    write_trace: Path | None,
    vocabulary: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    report.check_outputs(json_path, plot_path)
    drawn = {name: options.pop(name) for name in TRACE_OPTIONS}
    settings = LoadSettings(**options, timeout_s=served.timeout_s)
    console = report.console()
    folder = None if urls else served.folder()
    try:
        if trace_path is not None:
            _refuse_trace_options(context)
            trace = traces.load(trace_path)
        else:
            ids = vocabulary or (30_000 if folder is None else vocabulary_of(folder))
            trace = traces.generate(TraceSettings(**drawn, requests=settings.needed, vocabulary=ids))
    except TraceError as e:
        raise click.UsageError(str(e)) from e
    if write_trace is not None:
        trace.save(write_trace)
        console.print(f"{write_trace}: {len(trace.documents)} documents, {len(trace.requests)} requests")
        return
    serve = None
    if folder is not None:
        if separators:
            raise click.UsageError("--separator is for servers that --url names")
        serve = _serve_settings(served, folder, cache_gib, pool_share, stock, trace)
    try:
        with ExitStack() as stack:
            if serve is not None:
                _tell_memory(serve, console)
                specs = stack.enter_context(serving(serve, trace, console))
            else:
                specs = _named(urls, separators)
            key = os.environ.get(api_key_env) if serve is None else None
            result = _measure(specs, trace, settings, console, key)
    except (ServerError, ClientError, BenchError, TraceError) as e:
        raise click.ClickException(str(e)) from e
    _tell(result, settings, console)
    if json_path is not None:
        facts = {
            "load": settings,
            "trace": {
                "file": trace_path,
                "documents": len(trace.documents),
                "requests": len(trace.requests),
                "form": trace.form,
                "drawn": dict(trace.settings),
            },
            "serve": serve,
            "servers": specs,
        }
        results = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "gate"}
        used = None if serve is None else serve.threads
        report.write_json(json_path, report.report("load", facts, results, gate=result.gate, threads=used))
    if plot_path is not None:
        _plot(plot_path, result.points, settings)
    if failed := [p for p in result.points if p.failed]:
        raise click.ClickException(
            f"{sum(p.failed for p in failed)} requests failed ({failed[0].server}: {failed[0].errors[0]}): "
            "their measurements have no figures, and a search with failures is unreliable"
        )


def _measure(
    specs: Sequence[Spec], trace: Trace, settings: LoadSettings, console: Console, key: str | None
) -> LoadResult:
    clients = [Client(spec.url, api_key=key, timeout_s=settings.timeout_s) for spec in specs]
    targets = [connect(spec, client, trace) for spec, client in zip(specs, clients, strict=True)]
    return Measurement(targets, trace, settings, console).run()


def _serve_settings(
    served: Served, model: Path, cache_gib: float, share: float, stock: tuple[str, ...], trace: Trace
) -> ServeSettings:
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise click.UsageError(
            "VLLM_CPU_KVCACHE_SPACE overrides the cache sizes of both servers: "
            "unset the variable and use --cache-gib"
        )
    if given := {"pool_bytes", "pool_fraction"} & served.hypic.keys():
        raise click.UsageError(f"--hypic: drop {given.pop()}, which --cache-gib and --pool-share set")
    count = token_counter(model, trace)
    # What an operator who knows the corpus would set: pages and state slots run out together.
    mean = round(statistics.mean(count(content) for content in trace.documents.values()))
    cache = int(cache_gib * 2**30)
    options = {"expected_segment_tokens": mean, **served.hypic}
    return ServeSettings(model, served.threads, served.eager, cache, int(cache * share), options, stock)


def _tell_memory(serve: ServeSettings, console: Console) -> None:
    console.print(
        f"{serve.model.name}: {report.size(serve.cache_bytes)} for caches on each server; with hypic the "
        f"pool takes {report.size(serve.pool_bytes)} of these bytes"
    )


def _named(urls: Sequence[tuple[str, str]], separators: Sequence[tuple[str, str]]) -> list[Spec]:
    known, texts = dict(urls), dict(separators)
    if len(known) < len(urls):
        raise click.UsageError("--url: two servers have the same name")
    if unknown := texts.keys() - known.keys():
        raise click.UsageError(f"--separator {unknown.pop()}: no --url has this name")
    texts = {HYPIC: PrimitiveTexts().sep, **texts}
    return [Spec(name, url, texts.get(name)) for name, url in known.items()]


def _refuse_trace_options(context: click.Context) -> None:
    for name in sorted(TRACE_OPTIONS | {"vocabulary", "write_trace"}):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} shapes a generated trace; --trace reads one")


def vocabulary_of(model: Path) -> int:
    """Where the ids of ordinary tokens end, judged by the model's ``config.json``."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise click.UsageError(f"--model {model}: no readable config.json there: {e}") from e
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise click.UsageError(f"--model {model}: its config.json names no vocab_size; give --vocabulary")
    return min(size, LARGEST_ID) - SPARE_IDS


# -- telling -----------------------------------------------------------------------------------------


def _table(points: Sequence[RatePoint], s: LoadSettings) -> Any:
    def row(p: RatePoint) -> list[str]:
        verdict = "yes" if p.within else "no"
        if p.ttft_s is None:
            done = p.ends.get(End.DONE.value, 0)
            return [p.server, f"{p.rate:.3g}", f"{done} of {p.requests}", *["-"] * 7, verdict]
        return [
            p.server,
            f"{p.rate:.3g}",
            str(p.requests),
            *(seconds(x) for x in (p.ttft_s.p50, p.ttft_s.p90, p.ttft_s.p99)),
            "-" if p.tpot_s is None else seconds(p.tpot_s.p50),
            f"{p.output_tokens_per_s:.3g}",
            f"{p.prompt_tokens_per_s:.0f}",
            percent(p.cached_tokens / p.prompt_tokens) if p.prompt_tokens else "-",
            verdict,
        ]

    ordered = sorted(points, key=lambda p: (p.server, p.rate))
    columns = ("", "requests/s", "done", "TTFT p50", "p90", "p99", "per token", "out tok/s", "prompt tok/s")
    limit = f"p{s.percentile} <= {s.limit_s:g} s"
    return report.table("load", (*columns, "reused", limit), map(row, ordered))


def _tell(result: LoadResult, s: LoadSettings, console: Console) -> None:
    console.print(_table(result.points, s))
    for found in result.sustained:
        rate = "no rate" if found.rate is None else f"{found.rate:.3g} requests/s"
        bound = "" if found.failed_rate is None else f", not {found.failed_rate:.3g}"
        console.print(f"{found.server} sustains {rate}{bound} (p{s.percentile} of TTFT <= {s.limit_s:g} s)")
    for r in result.ratios:
        if r.ratio is not None:
            span = f" ({r.low:.3g} to {r.high:.3g})" if r.low is not None and r.high is not None else ""
            console.print(f"[bold]{r.server} sustains {r.ratio:.3g} times the rate of {r.baseline}[/]{span}")
    for name, counts in result.metrics.items():
        looked, hit = (counts.get(f"vllm:hypic_segments_{x}_total", 0) for x in ("queried", "hit"))
        if looked:
            used, room = (counts[f"vllm:hypic_pool_bytes_{x}"] for x in ("used", "capacity"))
            console.print(
                f"{name}: {percent(hit / looked)} of all segments were in the pool, warm-up included; at the "
                f"end {counts['vllm:hypic_records']:.0f} records, {report.size(used)} of {report.size(room)}"
            )
    if any(p.replayed for p in result.points):
        console.print("The trace is too short and started again: prefix caches may hold whole prompts.")


def _plot(path: Path, points: Sequence[RatePoint], s: LoadSettings) -> None:
    from .lib.report import COLOURS
    from .plots import Axes, Line, plot_lines

    colours = {STOCK: COLOURS["prefix"], HYPIC: COLOURS["warm"]}
    names = list(dict.fromkeys(p.server for p in points))

    def lines(value: Any) -> list[Line]:
        found = []
        for name in names:
            mine = sorted((p for p in points if p.server == name and p.complete), key=lambda p: p.rate)
            if mine:
                found.append(
                    Line(name, [p.rate for p in mine], [value(p) for p in mine], colour=colours.get(name))
                )
        return found

    x, limit = "requests per second", {f"limit, {s.limit_s:g} s": s.limit_s}
    panels = [
        Axes(
            f"time to first token, p{p}",
            x,
            "seconds",
            lines(lambda point, p=p: percentile(point.ttfts, p)),
            log_y=True,
            horizontal=limit if p == s.percentile else None,
        )
        for p in sorted({50, 90, 99, s.percentile})
    ]
    panels.append(
        Axes("prompt tokens served", x, "tokens per second", lines(lambda p: p.prompt_tokens_per_s))
    )
    plot_lines(path, panels)
