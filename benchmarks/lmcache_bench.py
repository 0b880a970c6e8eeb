"""``lmcache-bench``: LMCache's own ``long-doc-permutator`` against stock vLLM and this plugin.

``lmcache bench engine`` runs unmodified, against ``vllm serve``: its chat requests hold the same contexts in
ever other orders, no separators, and no question behind them.  The servers differ in what finds segments.
Each run has a fresh server, so its first request is cold; between any two runs of the plugin stock vLLM has
one, and ratios are to the two around it.

Documents count as reused as far as the server's cached tokens exceed all that is no document (system text,
headers, what joins the documents), from the second request on: a lower bound.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.harness.fidelity import GateFailed
from vllm_hypic.harness.report import percent
from vllm_hypic.harness.settings import with_options

from .lib import report
from .lib.gate import reporting_failures
from .lib.pretrained import SMOLLM2, MissingModel, find_model
from .lib.processes import launch
from .lib.report import seconds
from .lib.serving import Server, ServerError, fast_dtype
from .lib.stats import Spread
from .services import ServiceMissing, require_lmcache

STOCK = "stock"
MODES: tuple[dict[str, Any], ...] = ({"mode": "text"}, {"mode": "cdc", "mean_tokens": 512})
"""The plugin's option ``segment``.  Pieces of ``cdc`` must be shorter than documents are."""
RUN_S = 1800.0
START_S = 1200.0
SPARE_TOKENS = 256
"""Context beside documents and system text: headers, what joins them."""
CACHED = ("vllm:hypic_tokens_reused_total", "vllm:prefix_cache_hits_total")
"""Counters of cached tokens, of which a server's largest tells: stock has the latter alone."""
COLUMNS = ("", "documents reused", "first token", "min", "max", "stock / it", "min", "max")


class BenchFailed(RuntimeError):
    """``lmcache bench engine`` failed; the message holds the end of what it said."""


@dataclass(frozen=True)
class Workload:
    """``--ldp-*`` of ``lmcache bench engine``."""

    contexts: int
    context_tokens: int
    system_tokens: int
    permutations: int
    output_tokens: int
    seed: int

    @property
    def documents(self) -> int:
        """Tokens of one request's documents."""
        return self.contexts * self.context_tokens

    @property
    def longest(self) -> int:
        """Context that a server needs."""
        return self.documents + self.system_tokens + self.output_tokens + SPARE_TOKENS

    def arguments(self) -> list[str]:
        return [
            *("--workload", "long-doc-permutator", "--seed", str(self.seed)),
            *("--ldp-num-contexts", str(self.contexts), "--ldp-context-length", str(self.context_tokens)),
            *("--ldp-system-prompt-length", str(self.system_tokens)),
            *("--ldp-num-permutations", str(self.permutations)),
            *("--ldp-max-output-length", str(self.output_tokens)),
        ]


@dataclass(frozen=True)
class Serving:
    """How servers are started; what is not named is vLLM's default."""

    model: Path
    dtype: str
    threads: int | None
    eager: bool
    cache_bytes: int
    """For all that a server caches.  With the plugin, records have half of it."""
    workload: Workload
    stock: str
    """Further arguments of stock vLLM."""

    def server(self, segment: dict[str, Any] | None) -> Server:
        options = ["--max-model-len", str(self.workload.longest), "--disable-uvicorn-access-log"]
        options += ["--dtype", self.dtype]
        options += ["--enforce-eager"] if self.eager else []
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.threads is not None:
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.threads)}
        if segment is None:
            env["VLLM_PLUGINS"] = ""  # stock to the last import
            options += ["--enable-prefix-caching", "--kv-cache-memory-bytes", str(self.cache_bytes)]
            options += shlex.split(self.stock)
        else:
            pool = self.cache_bytes // 2
            # Islands are computed on purpose: what segments are found is told by what is reused.
            hypic = {"hypic": {"pool_bytes": pool, "islands": "none", "segment": segment}}
            options += ["--attention-backend", "hypic", "--additional-config", json.dumps(hypic)]
            options += ["--kv-cache-memory-bytes", str(self.cache_bytes - pool)]
        return Server(self.model, *options, env=env, start_timeout_s=START_S)


@dataclass(frozen=True)
class Run:
    """One run against one fresh server."""

    segment: dict[str, Any] | None
    """``None``: stock vLLM."""
    ttfts: tuple[float, ...]
    """Seconds to the first token of each request, in their order."""
    prompt_tokens: tuple[int, ...]
    cached_tokens: int
    """Of all requests, as the server counted."""
    load_average: float
    """Of the machine, in the minute that ended with the run."""

    @property
    def ttft(self) -> float:
        return statistics.median(self.ttfts)

    def reused(self, workload: Workload) -> float:
        """Share of the documents' tokens that was reused behind the first request, at least."""
        later = self.prompt_tokens[1:]
        beside = sum(later) - len(later) * workload.documents
        return max(0, self.cached_tokens - beside) / (len(later) * workload.documents)


@dataclass(frozen=True)
class Arm:
    """All runs of one server."""

    segment: dict[str, Any] | None
    reused: Spread
    ttft: Spread
    """Each run's median, seconds."""
    sooner: Spread | None
    """Mean of the medians of stock's runs before and after each run over its own."""


def run(serving: Serving, segment: dict[str, Any] | None) -> Run:
    """One run.  Raises :class:`ServerError` or :class:`BenchFailed`."""
    with (
        tempfile.TemporaryDirectory(prefix="hypic-lmcache-bench-") as name,
        serving.server(segment) as server,
    ):
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "bench", "engine", "--engine-url", server.url),
            *("--model", str(serving.model), *serving.workload.arguments()),
            *("--tokens-per-gb-kvcache", "1", "--no-interactive", "--quiet", "--output-dir", name),
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"}
        log = folder / "bench.log"
        process = launch(command, log, env=env, folder=folder)
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        table = folder / "bench_results.csv"
        if code or not table.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchFailed(f"lmcache bench engine ended with exit code {code}; its log ends:\n{tail}")
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if bad := [row for row in rows if row["successful"] != "True"]:
            raise BenchFailed(f"{len(bad)} of {len(rows)} requests failed: {bad[0]['error']}")
        metrics = server.metrics()
        load = os.getloadavg()[0]
    server.log.unlink(missing_ok=True)
    return Run(
        segment,
        tuple(float(row["ttft"]) for row in rows),
        tuple(int(row["num_input_tokens"]) for row in rows),
        int(max(metrics.get(counter, 0.0) for counter in CACHED)),
        round(load, 2),
    )


def arms_of(runs: Sequence[Run], workload: Workload) -> list[Arm]:
    """What ``runs`` show, which took turns: every other one is stock's, and the first and the last are."""
    arms: dict[str, list[int]] = {}
    for i, one in enumerate(runs):
        arms.setdefault(name_of(one.segment), []).append(i)
    found = []
    for places in arms.values():
        mine = [runs[i] for i in places]
        sooner = None
        if mine[0].segment is not None:
            around = [(runs[i - 1].ttft + runs[i + 1].ttft) / 2 for i in places]
            sooner = Spread.of([stock / one.ttft for stock, one in zip(around, mine, strict=True)])
        reused = Spread.of([one.reused(workload) for one in mine])
        found.append(Arm(mine[0].segment, reused, Spread.of([one.ttft for one in mine]), sooner))
    return found


def require_same_prompts(runs: Sequence[Run]) -> None:
    """Raises :class:`GateFailed` unless each request had as many tokens on every server."""
    for one in runs:
        if one.prompt_tokens != runs[0].prompt_tokens:
            raise GateFailed(
                f"{name_of(one.segment)} has prompts of {one.prompt_tokens} tokens, "
                f"{name_of(runs[0].segment)} of {runs[0].prompt_tokens}: expected equal prompts"
            )


def name_of(segment: dict[str, Any] | None) -> str:
    if segment is None:
        return STOCK
    return ", ".join([segment["mode"], *(f"{k}={v}" for k, v in segment.items() if k != "mode")])


def told(one: Run, workload: Workload) -> str:
    times = " ".join(seconds(x) for x in one.ttfts)
    reused = percent(one.reused(workload))
    return f"{name_of(one.segment)}: {reused} reused; first tokens {times}; load {one.load_average}"


def row(arm: Arm) -> list[str]:
    """A row of :data:`COLUMNS`."""
    sooner = arm.sooner
    ratios = ["", "", ""] if sooner is None else [f"{x:.1f}" for x in (sooner.median, sooner.min, sooner.max)]
    times = [seconds(x) for x in (arm.ttft.median, arm.ttft.min, arm.ttft.max)]
    return [name_of(arm.segment), percent(arm.reused.median), *times, *ratios]


class SegmentOption(click.ParamType):
    """The engine's option ``segment`` as JSON, checked."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            segment = json.loads(value)
            mode = HypicConfig.from_mapping({"segment": segment}).segment.mode
        except (ValueError, ConfigError) as e:
            self.fail(f"{value!r}: {e}", param, ctx)
        if mode == "off":
            self.fail(f"{value!r}: expected a mode that finds segments", param, ctx)
        return dict(segment)


def _workload_options(command: Any) -> Any:
    """One option for each field of :class:`Workload`."""
    numbers = [
        ("--contexts", 2, 5, "Documents of a request."),
        ("--context-tokens", 1, 1000, "Tokens of a document."),
        ("--system-tokens", 0, 200, "Length of the system message."),
        ("--permutations", 2, 10, "Requests of a run, each with its own order of documents."),
        ("--output-tokens", 1, 1, "Limit on the tokens of an answer."),
        ("--seed", 0, 42, "Seed of documents and orders."),
    ]
    options = [
        click.option(flag, type=click.IntRange(least), default=default, show_default=True, help=text)
        for flag, least, default, text in numbers
    ]
    return with_options(command, *options)


@click.command("lmcache-bench", help="LMCache's long-doc-permutator: stock vLLM and modes, in turns.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model's folder, with a chat template.  [default: SmolLM2]",
)
@click.option("--threads", type=click.IntRange(1, 512), help="OpenMP threads.  [default: all usable cores]")
@click.option("--eager", is_flag=True, help="Do not compile the model (vLLM's default compiles).")
@click.option(
    "--cache-gib",
    type=click.FloatRange(0.05, 4096),
    default=2.0,
    show_default=True,
    help="GiB of each server for all caches.",
)
@click.option(
    "--segment",
    "modes",
    type=SegmentOption(),
    multiple=True,
    default=MODES,
    help="The plugin's option `segment`; repeatable.  [default: text; cdc with pieces of 512 tokens]",
)
@click.option("--stock", default="", help='More arguments of stock vLLM, such as "--prefix-match-unit 16".')
@_workload_options
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs of each mode."
)
@click.option("--json", "json_path", type=report.REPORT_FILE, help="Also write results and settings here.")
@reporting_failures
def lmcache_bench(
    model: Path | None,
    threads: int | None,
    eager: bool,
    cache_gib: float,
    modes: Sequence[dict[str, Any]],
    stock: str,
    repeats: int,
    json_path: Path | None,
    **workload: int,
) -> None:
    report.check_outputs(json_path, None)
    try:
        require_lmcache()
        folder = model or find_model(SMOLLM2)
    except (ServiceMissing, MissingModel) as e:
        raise click.UsageError(str(e)) from e
    dtype = "auto" if model else fast_dtype()  # a model of the user may have layers that need its own dtype
    cache = int(cache_gib * 2**30)
    serving = Serving(folder, dtype, threads, eager, cache, Workload(**workload), stock)
    to = report.console()
    turns = [None, *(segment for _ in range(repeats) for mode in modes for segment in (mode, None))]
    runs: list[Run] = []
    try:
        with report.progress(to, len(turns)) as steps:
            for segment in turns:
                steps.show(name_of(segment))
                runs.append(run(serving, segment))
                to.print(told(runs[-1], serving.workload), style="dim")
                steps.done()
    except (ServerError, BenchFailed) as e:
        raise click.ClickException(str(e)) from e
    require_same_prompts(runs)
    arms = arms_of(runs, serving.workload)
    to.print(report.table(f"long-doc-permutator, {folder.name}", COLUMNS, map(row, arms)))
    if json_path is not None:
        gate = "all requests were answered, and each had as many tokens on every server"
        results = {"arms": arms, "runs": runs}
        written = report.report("lmcache-bench", serving, results, gate=gate, threads=threads)
        report.write_json(json_path, written)
