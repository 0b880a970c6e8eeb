"""``memory``: what concurrent requests on the same documents hold, with stock vLLM and with the plugin.

Every request has all documents, in an order of its own, and a question of its own. Bytes are counted by the
engines' own books once all requests are generating: vLLM's blocks that requests hold (its prefix cache is
on) and, with the plugin, pages and state slots of the public pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness import engine_calls
from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.report import console, size
from vllm_hypic.harness.settings import EngineSettings

from .engine_calls import Crowd, crowd
from .lib import gate, report
from .lib.prompts import BESIDE, HEAD, QUESTION, Shape, Writer
from .lib.report import check_outputs, described, output_options
from .lib.settings import SHORTEST, engine_options
from .options import needed_context

ROOM = 2048
"""Output tokens a request may produce while it waits for the last one to start."""


@click.command(help="Bytes held by concurrent requests on the same documents.")
@engine_options(kv_gib=4.0)
@click.option("--requests", type=click.IntRange(1, 256), default=32, show_default=True)
@click.option("--segments", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=1024, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the documents.")
@output_options
@gate.reporting_failures
def memory(
    engine: EngineSettings,
    requests: int,
    segments: int,
    tokens: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    shape = Shape(segments, tokens)
    crowds, facts = _measure(engine, shape, requests, seed)
    stock, hypic = crowds["stock"], crowds["hypic"]
    to = console()
    title = f"{requests} requests at once on {shape} shared tokens, {engine.model.name}"
    to.print(report.table(title, ("", "stock vLLM", "hypic"), _rows(stock, hypic)))
    ratio = stock.usage.total_bytes / hypic.usage.total_bytes
    to.print(
        f"Gate passed: cold and warm answers are bit-identical. {hypic.usage.records} records serve "
        f"{requests} requests; stock vLLM holds {ratio:.2f} times as much."
    )
    if json_path is not None:
        settings = {"engine": engine, "requests": requests, "shape": shape, "seed": seed}
        results = {
            "crowds": crowds,
            "bytes": {
                name: {
                    "private": one.usage.kv_bytes,
                    "public": one.usage.pool_bytes,
                    "total": one.usage.total_bytes,
                    "per_request": one.usage.total_bytes / requests,
                }
                for name, one in crowds.items()
            },
            "stock_over_hypic": ratio,
            "engines": facts,
        }
        passed = {"cold_equals_warm": True, "records": hypic.usage.records}
        report.write_json(
            json_path, report.report("memory", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        from .plots import plot_bars

        bars = {
            name: {"private": one.usage.kv_bytes / 2**20, "public": one.usage.pool_bytes / 2**20}
            for name, one in crowds.items()
        }
        plot_bars(plot_path, bars, title=title, label="MiB", stacked=True)


def _measure(
    engine: EngineSettings, shape: Shape, requests: int, seed: int
) -> tuple[dict[str, Crowd], dict[str, Any]]:
    context = needed_context([(shape.segments, shape.tokens)], BESIDE + ROOM)
    # Blocks that nobody holds count as free, cached or not: prefix caching costs stock vLLM nothing here.
    stock = Engine(engine, context, hypic=False, enable_prefix_caching=True)
    hypic = Engine(engine, context, hypic=True)
    with report.progress(console(), 3, "starting engines") as steps, running(stock, hypic):
        writer = Writer(hypic.vocabulary, seed)
        first = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
        prompts = [
            first.reordered(writer.order(shape.segments), writer.document(QUESTION)) for _ in range(requests)
        ]
        steps.show("gate")
        marked = [p.marked(hypic.separator) for p in prompts]
        warm = gate.require_cold_equals_warm(hypic, Ask(marked[-1]))
        gate.require_reuse(warm, shape.segments, shape.tokens, hypic.link())
        hypic.call(engine_calls.reset)
        steps.done()
        crowds = {}
        for one, tokens in ((stock, [p.plain() for p in prompts]), (hypic, marked)):
            steps.show(f"{requests} requests, {one.name}")
            crowds[one.name] = one.call(crowd, [_long(t) for t in tokens])
            steps.done()
        _check(crowds["hypic"], first)
        return crowds, described(stock, hypic)


def _long(tokens: list[int]) -> Ask:
    return Ask(tokens, max_tokens=ROOM, logprobs=None)


def _check(hypic: Crowd, prompt: Prompt) -> None:
    """One record a document, and one for the leading segment."""
    expected = len(prompt.documents) + 1
    if hypic.usage.records != expected or hypic.usage.pinned != expected:
        raise gate.GateFailed(
            f"{hypic.usage.records} records in the pool, {hypic.usage.pinned} of them held: "
            f"expected {expected}, one for each document and the leading segment"
        )


def _rows(stock: Crowd, hypic: Crowd) -> list[Sequence[str]]:
    both = (stock.usage, hypic.usage)
    requests = len(stock.cached)
    return [
        ("requests generating", *(str(u.running) for u in both)),
        ("private blocks", *(str(u.blocks) for u in both)),
        ("bytes a block", *(size(u.block_bytes) for u in both)),
        ("private bytes", *(size(u.kv_bytes) for u in both)),
        ("public bytes", *(size(u.pool_bytes) for u in both)),
        ("all bytes", *(size(u.total_bytes) for u in both)),
        ("  per request", *(size(u.total_bytes / requests) for u in both)),
        ("records", "", str(hypic.usage.records)),
        ("preemptions", str(stock.preemptions), str(hypic.preemptions)),
        ("prompt tokens from cache", str(sum(stock.cached)), str(sum(hypic.cached))),
    ]
