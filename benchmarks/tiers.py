"""``tiers``: time to first token by where the documents' records are: nowhere, in the pool, in each tier.

One engine has all tiers, so that a request's records are computed once and written to every tier by the
engine's own way.  Before a tier's turn the pool is emptied, and that tier is the first to be asked: what it
has is fetched, and moves to no faster tier.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness import engine_calls
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.fidelity import Distance, GateFailed
from vllm_hypic.harness.report import Steps, console, size
from vllm_hypic.harness.settings import EngineSettings

from . import engine_calls as own_calls
from . import page_cache
from .lib import gate, report
from .lib.prompts import BESIDE, HEAD, QUESTION, Shape, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Spread
from .options import needed_context, repeat_options
from .services import LMCacheServer, RedisServer, ServiceError, ServiceMissing, require_lmcache

DEADLINE_S = 60.0
"""Deadline of a fetch: a tier that is slow here is measured, not given up."""
STOCK, POOL = "stock", "pool"


@dataclass(frozen=True)
class RecordPlace:
    """One place where records may be."""

    kind: str
    label: str
    tier: str | None = None
    """The tier's name; ``None``: none is asked."""
    cold_files: bool = False
    """The tier's files are not in the page cache."""


PLACES = (
    RecordPlace(STOCK, "stock vLLM, full recompute"),
    RecordPlace(POOL, "pool"),
    RecordPlace("memory", "memory", "memory"),
    RecordPlace("disk-warm", "disk, page cache warm", "disk"),
    RecordPlace("disk-cold", "disk, page cache cold", "disk", cold_files=True),
    RecordPlace("redis", "Redis server", "redis"),
    RecordPlace("lmcache", "LMCache embedded, memory", "lmcache"),
    RecordPlace("lmcache-fs", "LMCache embedded, disk", "lmcache-fs"),
    RecordPlace("lmcache-server", "LMCache server, memory", "lmcache-server"),
)
"""Places in the table's order."""


@dataclass(frozen=True)
class TierSetup:
    """Which rows there are, and the tiers for them; ``left_out``: why others are not, by kind."""

    rows: tuple[RecordPlace, ...]
    tiers: tuple[dict[str, Any], ...]
    files: dict[str, tuple[Path, str]]
    """Where tiers keep records as files: a folder, and what matches them in it."""
    left_out: dict[str, str]


@dataclass(frozen=True)
class PlaceTimes:
    """One row.  ``over_stock`` and ``over_pool``: how many times sooner, and later, in the same repeat."""

    kind: str
    seconds: Spread
    over_stock: Spread
    over_pool: Spread
    read_bytes: int = 0
    """Bytes of one request, from the tier."""
    bytes_per_s: float | None = None
    """Read bytes over what the request takes longer than from the pool; ``None``: it takes no longer."""
    read_seconds: Spread | None = None
    """Single reads, one record each."""


@dataclass
class _Found:
    """What one row's repeats gave."""

    answers: list[Answer] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    read_bytes: int = 0


@click.command(help="First token by place of records: stock recompute, pool, memory, disk, Redis, LMCache.")
@engine_options()
@repeat_options
@click.option("--segments", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=2048, show_default=True)
@click.option(
    "--tier-gib",
    type=click.FloatRange(0.01, 1024),
    default=0.5,
    show_default=True,
    help="Budget of every tier, which must hold one prompt's records.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Folder on the disk to measure.  [default: the folder for temporary files]",
)
@output_options
@gate.reporting_failures
def tiers(
    engine: EngineSettings,
    segments: int,
    tokens: int,
    repeats: int,
    seed: int,
    tier_gib: float,
    folder: Path | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    if "store" in engine.hypic:
        raise click.UsageError("--hypic: this benchmark brings its own store; leave the option 'store' out")
    shape = Shape(segments, tokens)
    to = console()
    with _setup(tier_gib, folder) as setup:
        bench = _Bench(engine, shape, seed, setup)
        with report.progress(to, repeats + 1, "starting engines") as steps:
            found, distance = bench.measure(repeats, steps)
        engines = described(bench.stock, bench.hypic)
    title = f"time to first token, {shape}, {engine.model.name}"
    to.print(report.table(title, COLUMNS, [_cells(row) for row in found]))
    for kind, reason in setup.left_out.items():
        to.print(f"not measured: {_label(kind)}: {reason}", soft_wrap=True)
    to.print(
        "Gate passed: the answers from every tier equal the pool's bit for bit, in every repeat. "
        f"First token against stock vLLM's: KL {distance.kl:.2g} nats over the top 20."
    )
    if json_path is not None:
        settings = {
            "engine": engine,
            "shape": shape,
            "repeats": repeats,
            "seed": seed,
            "tier_gib": tier_gib,
            "tiers": [tier["name"] for tier in setup.tiers],
            "deadline_s": DEADLINE_S,
        }
        passed = {"tiers_equal_pool": True, "distance_from_stock": distance}
        results = {"rows": found, "left_out": setup.left_out, "engines": engines}
        report.write_json(
            json_path, report.report("tiers", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        from .plots import plot_bars

        bars = {_label(row.kind): {"": row.seconds.median} for row in found if row.kind != STOCK}
        plot_bars(plot_path, bars, title=title, label="seconds")


# -- the tiers ---------------------------------------------------------------------------------------


@contextmanager
def _setup(tier_gib: float, folder: Path | None) -> Iterator[TierSetup]:
    """Servers up, folders made; what is missing is left out with the reason.

    Raises ``click.ClickException`` when a server that is there does not start.
    """
    nbytes = int(tier_gib * 2**30)
    with ExitStack() as stack:
        own = tempfile.TemporaryDirectory(
            prefix="vllm-hypic-bench-tiers-", dir=folder, ignore_cleanup_errors=True
        )
        top = Path(stack.enter_context(own))
        disk, below_lmcache = top / "disk", top / "lmcache"
        below_lmcache.mkdir()
        made: list[dict[str, Any]] = [
            {"type": "memory", "name": "memory", "bytes": nbytes},
            {"type": "disk", "name": "disk", "path": str(disk), "bytes": nbytes},
        ]
        missing: dict[str, str] = {}
        try:
            url = stack.enter_context(RedisServer(top, durable=False)).url
            made.append({"type": "redis", "name": "redis", "url": url})
        except ServiceMissing as e:
            missing["redis"] = str(e)
        except ServiceError as e:
            raise click.ClickException(str(e)) from e
        try:
            require_lmcache()
            adapter = {"type": "fs_native", "base_path": str(below_lmcache)}
            made.append({"type": "lmcache", "name": "lmcache", "l1_bytes": nbytes})
            made.append({"type": "lmcache", "name": "lmcache-fs", "l1_bytes": nbytes, "l2": [adapter]})
            url = stack.enter_context(LMCacheServer(top, tier_gib, durable=False)).url
            made.append({"type": "lmcache", "name": "lmcache-server", "url": url})
        except ServiceMissing as e:
            missing |= dict.fromkeys(("lmcache", "lmcache-fs", "lmcache-server"), str(e))
        except ServiceError as e:
            raise click.ClickException(str(e)) from e
        names = {tier["name"] for tier in made}
        rows = [row for row in PLACES if row.tier is None or row.tier in names]
        if (reason := _keeps_pages(top)) is not None:
            rows = [row for row in rows if not row.cold_files]
            missing["disk-cold"] = reason
        files = {"disk": (disk, "*/*/*.hypic"), "lmcache-fs": (below_lmcache, "**/*")}
        yield TierSetup(tuple(rows), tuple(made), files, missing)


def _keeps_pages(folder: Path) -> str | None:
    """Why files there cannot be read from the disk again, if they cannot."""
    probe = folder / "probe"
    probe.write_bytes(bytes(1 << 20))
    if page_cache.drop([probe]):
        return f"the file system of {folder.parent} keeps files in memory; choose a disk with --folder"
    return None


# -- measuring ---------------------------------------------------------------------------------------


class _Bench:
    """The two engines and what they are asked."""

    def __init__(self, engine: EngineSettings, shape: Shape, seed: int, setup: TierSetup) -> None:
        self.shape, self.seed, self.setup = shape, seed, setup
        store = {"tiers": list(setup.tiers), "admission": "always", "deadline_s": DEADLINE_S}
        context = needed_context([(shape.segments, shape.tokens)], BESIDE)
        self.stock = Engine(engine, context, hypic=False)
        with_store = replace(engine, hypic={**engine.hypic, "store": store})
        self.hypic = Engine(with_store, context, hypic=True)
        self.records = shape.segments + 1

    def measure(self, repeats: int, steps: Steps) -> tuple[list[PlaceTimes], Distance]:
        """All rows, and the first token's distance from stock vLLM's.

        The first round warms up and is not counted.  Raises :class:`~.gate.GateFailed` when an answer is
        wrong or comes from elsewhere than it should.
        """
        with running(self.stock, self.hypic):
            self.hypic.call(own_calls.report_here_only)
            writer = Writer(self.hypic.vocabulary, self.seed)
            steps.show("gate")
            distance = self._gate(writer)
            self._round(writer, self.setup.rows, {row.kind: _Found() for row in self.setup.rows})
            steps.done()
            found = {row.kind: _Found() for row in self.setup.rows}
            for repeat in range(repeats):
                steps.show(f"repeat {repeat + 1}")
                # Another row begins each time: what changes in the course of a round changes for all alike.
                at = repeat * 2 % len(self.setup.rows)
                self._round(writer, self.setup.rows[at:] + self.setup.rows[:at], found)
                steps.done()
        return _measured(self.setup.rows, found), distance

    def _gate(self, writer: Writer) -> Distance:
        first, again = self._prompts(writer)
        gate.require_cold_equals_warm(self.hypic, Ask(first.marked(self.hypic.separator)))
        distance = gate.first_token_distance(self.stock, again.plain(), self.hypic, self._ask(again))
        gate.require_close(distance)
        return distance

    def _prompts(self, writer: Writer) -> tuple[Prompt, Prompt]:
        """Fresh documents; the same ones in another order, with another question."""
        first = writer.prompt(self.shape.segments, self.shape.tokens, head=HEAD, question=QUESTION)
        return first, first.reordered(writer.order(self.shape.segments), writer.document(QUESTION))

    def _ask(self, prompt: Prompt) -> Ask:
        return Ask(prompt.marked(self.hypic.separator))

    def _round(self, writer: Writer, rows: Sequence[RecordPlace], found: Mapping[str, _Found]) -> None:
        """Every row once, on fresh documents that all of them share."""
        first, again = self._prompts(writer)
        self._fill(first)
        answers: dict[str, Answer] = {}
        for row in rows:
            if row.kind == STOCK:
                answers[row.kind] = self.stock.ask(Ask(again.plain()))
                gate.require_fresh(answers[row.kind], "stock vLLM")
            elif row.tier is None:
                self.hypic.call(engine_calls.forget_streams)
                answers[row.kind] = self._cached(row, again)
            else:
                answers[row.kind] = self._fetched(row, row.tier, again, found[row.kind])
            found[row.kind].answers.append(answers[row.kind])
        for row in rows:
            if row.tier is not None:
                gate.require_same(
                    f"answers from the pool and from {row.label}", answers[POOL], answers[row.kind]
                )

    def _fill(self, prompt: Prompt) -> None:
        """Compute the prompt's records; afterwards they are in the pool and in every tier, alone."""
        self.hypic.call(engine_calls.reset)
        self.hypic.call(own_calls.drain)
        before = self.hypic.call(own_calls.tier_counts)
        gate.require_fresh(self.hypic.ask(self._ask(prompt)), "a cold request")
        for _ in range(self.records):
            self.hypic.call(own_calls.drain)
            now = self.hypic.call(own_calls.tier_counts)
            lacking = [name for name in now if now[name].stored - before[name].stored < self.records]
            if not lacking:
                return
            self.hypic.ask(self._ask(prompt))  # a step hands over a few records
        raise GateFailed(
            f"tier {lacking[0]} took {now[lacking[0]].stored - before[lacking[0]].stored} of {self.records} "
            "records; is --tier-gib too small?"
        )

    def _cached(self, row: RecordPlace, prompt: Prompt) -> Answer:
        """The answer; no segment was computed for it."""
        before = self.hypic.call(own_calls.computed)
        answer = self.hypic.ask(self._ask(prompt))
        gate.require_reuse(answer, self.shape.segments, self.shape.tokens, self.hypic.link())
        if made := self.hypic.call(own_calls.computed) - before:
            raise GateFailed(f"{row.label}: {made} segments were computed again")
        return answer

    def _fetched(self, row: RecordPlace, tier: str, prompt: Prompt, found: _Found) -> Answer:
        self.hypic.call(own_calls.empty_pool)
        self.hypic.call(own_calls.ask_first, tier)
        if tier == "lmcache-fs":
            self.hypic.call(own_calls.drop_lmcache_memory, tier)
        if tier in self.setup.files:
            self._prepare_files(row, *self.setup.files[tier])
        before = self.hypic.call(own_calls.tier_counts)[tier]
        answer = self._cached(row, prompt)
        after = self.hypic.call(own_calls.tier_counts)[tier]
        if after.hits - before.hits != self.records:
            raise GateFailed(
                f"{row.label}: the tier served {after.hits - before.hits} of {self.records} records"
            )
        found.read_bytes = after.read_bytes - before.read_bytes
        found.reads += after.read_seconds
        return answer

    def _prepare_files(self, row: RecordPlace, folder: Path, pattern: str) -> None:
        files = [path for path in folder.glob(pattern) if path.is_file()]
        if not files:
            raise GateFailed(f"{row.label}: no files {pattern} in {folder}")
        if not row.cold_files:
            page_cache.warm_up(files)
        elif share := page_cache.drop(files):
            raise GateFailed(f"{row.label}: {share:.0%} of the files' pages are still in memory")


def _measured(rows: Sequence[RecordPlace], found: Mapping[str, _Found]) -> list[PlaceTimes]:
    times = {row.kind: Spread.of([a.first_token_s for a in found[row.kind].answers]) for row in rows}
    return [_row(row, times, found[row.kind]) for row in rows]


def _row(row: RecordPlace, times: Mapping[str, Spread], found: _Found) -> PlaceTimes:
    own = times[row.kind]
    longer = [a - b for a, b in zip(own.values, times[POOL].values, strict=True)]
    extra = Spread.of(longer).median
    return PlaceTimes(
        row.kind,
        own,
        times[STOCK].over(own),
        own.over(times[POOL]),
        found.read_bytes,
        found.read_bytes / extra if found.read_bytes and extra > 0 else None,
        Spread.of(found.reads) if found.reads else None,
    )


COLUMNS = ("", "median", "min", "max", "x sooner than stock", "x pool", "read", "one read", "MB/s")


def _cells(row: PlaceTimes) -> list[str]:
    own = row.seconds
    return [
        _label(row.kind),
        *(seconds(x) for x in (own.median, own.min, own.max)),
        f"{row.over_stock.median:.2f}",
        f"{row.over_pool.median:.2f}" if row.kind != STOCK else "",
        size(row.read_bytes) if row.read_bytes else "",
        seconds(row.read_seconds.median) if row.read_seconds else "",
        f"{row.bytes_per_s / 1e6:.0f}" if row.bytes_per_s else "",
    ]


def _label(kind: str) -> str:
    return next(row.label for row in PLACES if row.kind == kind)
