"""``python -m examples.demo.parallel``: two workers prefill, a third server combines.

Starts a router, two workers and a combine node on this machine, sends a prompt of eight segments of uneven
lengths that nobody has seen, and shows where its time went.  The combine node alone, as an ordinary server,
must give the same answer: the same tokens, and the same logprobs to the last bit.  Exits with 1 when anything
is off; stops what it started in any case.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.lib.client import Breakdown, Reply, completion, separator_of
from benchmarks.lib.cluster import FAILURES, Cluster, Setup
from benchmarks.lib.prompts import Writer, uneven, writer
from benchmarks.lib.report import seconds
from benchmarks.lib.serving import Server, ServerError
from benchmarks.lib.sizes import SIZES, random_model
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.report import console, percent, size, table

LENGTHS = (1536, 640, 1152, 320, 960, 832, 448, 1280)
"""Tokens of the segments, the leading segment first."""
QUESTION = 32
ANSWER = 8
CONTEXT = 32768


@dataclass(frozen=True)
class Counted:
    """Counts of the servers while they answered a request."""

    received: int
    """Records that the combine node received from workers."""
    not_received: int
    """Records that the combine node awaited in vain."""
    computed: int
    """Segments that the combine node computed itself."""
    record_bytes: int
    pushed: dict[str, int]
    """Records that each worker delivered, by the worker's name."""
    failures: int
    """Failures that the router counted."""


def send_spread(cluster: Cluster, prompt: list[int]) -> tuple[Reply, Counted]:
    """Send the prompt through the router; return the reply, and the servers' counts meanwhile."""
    [combine] = cluster.combines
    routers, before = cluster.router.samples(), combine.metrics()
    workers = {w.name: w.metrics() for w in cluster.workers}
    reply = completion(cluster.router.url, {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True})
    after = _once_counted(combine, before)
    router_failures = {k: v for k, v in cluster.router.samples().items() if k[0] == FAILURES}
    return reply, Counted(
        received=_grown("segments_received_total", before, after),
        not_received=_grown("segments_not_received_total", before, after),
        computed=_grown("segments_computed_total", before, after),
        record_bytes=_grown("pool_bytes_used", before, after),
        pushed={w.name: _pushed(w, workers[w.name]) for w in cluster.workers},
        failures=int(sum(v - routers.get(k, 0) for k, v in router_failures.items())),
    )


def send_alone(server: Server, prompt: list[int]) -> tuple[Reply, int]:
    """Send the prompt to a single server; return the reply, and the number of segments that it computed.
    No other request has this salt, so the server must compute all segments."""
    before = server.metrics()
    body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "cache_salt": "alone"}
    reply = completion(server.url, body)
    return reply, _grown("segments_computed_total", before, _once_counted(server, before))


def check(spread: Reply, counted: Counted, alone: Reply, alone_computed: int, segments: int) -> list[str]:
    """Return the faults of the two replies, an empty list if all is well."""
    faults = []
    if alone_computed != segments:
        faults.append(f"the cold server alone computed {alone_computed} of {segments} segments: expected all")
    if (counted.received, counted.not_received, counted.computed) != (segments, 0, 0):
        faults.append(
            f"of {segments} segments {counted.received} came from workers, "
            f"{counted.not_received} did not arrive, "
            f"and the combine node computed {counted.computed}: expected all from workers"
        )
    if idle := [name for name, count in counted.pushed.items() if not count]:
        faults.append(f"{', '.join(idle)} delivered no records")
    if counted.failures:
        faults.append(f"the router counted {counted.failures} failures")
    if spread.breakdown is None or spread.breakdown.dispatch_s is None:
        faults.append(f"the router did not report where the time went: {spread.breakdown}")
    if spread.tokens != alone.tokens:
        faults.append(f"the cluster answers {spread.tokens}, a single server {alone.tokens}")
    elif not spread.same_as(alone):
        faults.append("the tokens equal a single server's, but the logprobs differ")
    return faults


def run(cluster: Cluster, draw: Writer, out: Console) -> int:
    """Send a cold prompt both ways, compare the replies, print the result and return the exit code."""
    [combine] = cluster.combines
    separator = separator_of(combine.url)
    for _ in range(2):  # warm-up: costs of a process's first requests stay out of the times
        prompt = uneven(draw, tuple(n // 4 for n in LENGTHS), QUESTION).marked(separator)
        send_spread(cluster, prompt)
        send_alone(combine, prompt)
    cold = uneven(draw, LENGTHS, QUESTION)
    spread, counted = send_spread(cluster, cold.marked(separator))
    alone, alone_computed = send_alone(combine, cold.marked(separator))
    lengths = ", ".join(map(str, LENGTHS))
    out.print(f"\na cold prompt of {len(cold)} tokens, in segments of {lengths} and a question of {QUESTION}")
    out.print(_table(cluster, spread, counted, alone))
    faults = check(spread, counted, alone, alone_computed, len(LENGTHS))
    for fault in faults:
        out.print(f"[bold red]failed:[/] {escape(fault)}")
    if not faults:
        out.print(
            "[bold green]passed:[/] tokens and logprobs are bit for bit those of a single server; "
            "all servers are stopped."
        )
    return 1 if faults else 0


def _table(cluster: Cluster, spread: Reply, counted: Counted, alone: Reply) -> Table:
    rows: list[tuple[str, str, str]] = []
    found = spread.breakdown
    if found is not None and found.dispatch_s is not None and found.combine_s is not None:
        exposed = found.exposed_transfer_s or 0.0
        rows = [
            ("plan", seconds(found.plan_s), "tokenise, plan, assign"),
            ("dispatch", seconds(found.dispatch_s), "first segment sent out to last record delivered"),
            ("  prefill", seconds(found.dispatch_s - exposed), _shares(cluster, found)),
            (
                "  transfer, exposed",
                seconds(exposed),
                f"{percent(exposed / found.dispatch_s)} of dispatch; {counted.received} records, "
                f"{size(counted.record_bytes)} in the pool",
            ),
            ("combine", seconds(found.combine_s), "last record delivered to first byte of the answer"),
        ]
    ratio = alone.first_token_s / spread.first_token_s
    rows += [
        ("time to first token", seconds(spread.first_token_s), "as the client sees it"),
        ("  a single server", seconds(alone.first_token_s), f"{ratio:.2f} times as long"),
    ]
    return table("where the time went", ("", "time", ""), rows)


def _shares(cluster: Cluster, found: Breakdown) -> str:
    """Return a text with the segments and tokens that each worker prefilled."""
    names = {w.url: w.name for w in cluster.workers}
    tokens: dict[str, list[int]] = {name: [] for name in names.values()}
    for part in found.segments or ():
        tokens.setdefault(names.get(part.worker or "", "no worker"), []).append(part.tokens)
    return "; ".join(f"{name}: {len(n)} segments, {sum(n)} tokens" for name, n in tokens.items())


def _pushed(worker: Server, before: dict[str, float]) -> int:
    return _grown("segments_pushed_total", before, worker.metrics())


def _once_counted(server: Server, before: dict[str, float]) -> dict[str, float]:
    """Return the metrics once the server has counted another request and pins no record for it."""
    name = "vllm:hypic_requests_total"
    return server.wait_for_metrics(
        lambda m: m.get(name, 0) > before.get(name, 0) and not m.get("vllm:hypic_pinned", 0)
    )


def _grown(name: str, before: dict[str, float], after: dict[str, float]) -> int:
    return int(after.get(f"vllm:hypic_{name}", 0) - before.get(f"vllm:hypic_{name}", 0))


@click.command(help=(__doc__ or "").split("\n", 1)[1])
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model's folder.  Default: the demo model.",
)
@click.option("--size", "size_", type=click.Choice(list(SIZES)), help="Size of a random model.")
@click.option("--threads", type=click.IntRange(1, 512), default=1, show_default=True, help="Per server.")
@click.option("--compile/--eager", "compiled", default=False, show_default=True, help="Compile the model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
def main(model: Path | None, size_: str | None, threads: int, compiled: bool, seed: int) -> None:
    if model is not None and size_ is not None:
        raise click.UsageError("--model and --size: expected only one of the two")
    out = console()
    folder = model or (random_model(size_) if size_ else EXAMPLE / "model")
    if not (folder / "config.json").is_file():
        out.print(
            f"There is no model at {folder}: run this from a checkout of the repository, or give --model."
        )
        sys.exit(2)
    # On a busy machine a segment takes seconds: the router gives a worker up after 30 s instead of 3 s.
    router = ("--straggler-min-s", "30")
    setup = Setup(folder, threads=threads, eager=not compiled, context=CONTEXT, router=router)
    out.print(
        f"{folder.name}: router, 2 workers and a combine node, {threads} thread{'s' * (threads > 1)} each"
    )
    try:
        with Cluster(setup) as cluster:
            code = run(cluster, writer(folder, seed), out)
    except (ServerError, httpx.HTTPError) as e:
        out.print(f"[bold red]failed:[/] {escape(f'{type(e).__name__}: {e}')}")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
