"""Two workers against one, and what combining costs for segments of any length: ``segment-parallel``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
from rich.console import Console

from vllm_hypic.harness.report import console, percent, progress, table
from vllm_hypic.harness.settings import model_context

from .lib.client import Breakdown, Reply, completion, separator_of
from .lib.cluster import Cluster, Setup
from .lib.prompts import uneven, writer
from .lib.report import check_outputs, report, seconds, write_json
from .lib.serving import ServerError
from .lib.sizes import SIZES, random_model
from .lib.stats import Spread

LENGTHS = (1536, 1280, 1152, 1024, 960, 832, 768, 640)
"""Tokens of the segments, the leading one first: 8192 in all."""
EVEN_LENGTHS = (256, 512, 1024, 2048)
"""Tokens of each of as many segments, for the time of combining."""
QUESTION = 32
CONTEXT = 32768
DISPATCH_TARGET, FIRST_TOKEN_TARGET, EXPOSED_TARGET = 1.85, 1.7, 0.05


@dataclass(frozen=True)
class Arm:
    """One way to answer the same kind of prompt; seconds."""

    first_token: Spread
    dispatch: Spread | None
    exposed: Spread | None
    """The exposed transfer as a share of ``dispatch``."""
    combine: Spread | None


@dataclass(frozen=True)
class Even:
    """Prompts of equal segments, by two workers; seconds."""

    tokens: int
    dispatch: Spread
    combine: Spread


@dataclass(frozen=True)
class Speedup:
    """``two`` and ``one``: workers behind a router; ``single``: the combine node alone, no router."""

    two: Arm
    one: Arm
    single: Arm
    dispatch_ratio: Spread
    """``one`` over ``two``, repeat by repeat."""
    first_token_ratio: Spread
    even: tuple[Even, ...]


def measure(
    cluster: Cluster, setup: Setup, *, repeats: int, seed: int, json_path: Path | None, out: Console
) -> None:
    """Measure, show, and write ``json_path`` if given.

    Raises :class:`ServerError` where a request was not spread as it should have been, or where a single
    server gives another answer.
    """
    two, [combine] = cluster.router, cluster.combines
    # A router spreads over a single worker only when told to: nothing is gained by it.
    one = cluster.another_router(cluster.workers[:1], "--min-gain", "-1")
    draw, separator = writer(setup.model, seed), separator_of(combine.url)
    asked = 0

    def ask(url: str, prompt: list[int]) -> Reply:
        """Every prompt is new to everybody."""
        nonlocal asked
        asked += 1
        return completion(url, {"prompt": prompt, "max_tokens": 1, "cache_salt": f"{seed}-{asked}"})

    def spread(url: str, lengths: tuple[int, ...]) -> Reply:
        return _spread(ask(url, uneven(draw, lengths, QUESTION).marked(separator)), len(lengths))

    with progress(out, 3 + repeats * (3 + len(EVEN_LENGTHS)), "warming up") as steps:
        short = tuple(n // 4 for n in LENGTHS)
        for url in (two.url, one.url):
            spread(url, short)
            steps.done()
        _gate(ask, two.url, combine.url, uneven(draw, short, QUESTION).marked(separator), len(short))
        steps.done()
        replies: dict[str, list[Reply]] = {"two": [], "one": [], "single": []}
        for turn in range(repeats):
            for name in list(replies)[:: -1 if turn % 2 else 1]:
                steps.show(name)
                if name == "single":
                    reply = ask(combine.url, uneven(draw, LENGTHS, QUESTION).marked(separator))
                else:
                    reply = spread(two.url if name == "two" else one.url, LENGTHS)
                replies[name].append(reply)
                steps.done()
        even: dict[int, list[Reply]] = {n: [] for n in EVEN_LENGTHS}
        for turn in range(repeats):
            for n in EVEN_LENGTHS[:: -1 if turn % 2 else 1]:
                steps.show(f"{len(LENGTHS)} x {n} tokens")
                even[n].append(spread(two.url, (n,) * len(LENGTHS)))
                steps.done()
    arms = {name: _arm(found) for name, found in replies.items()}
    assert arms["one"].dispatch is not None and arms["two"].dispatch is not None
    result = Speedup(
        **arms,
        dispatch_ratio=arms["one"].dispatch.over(arms["two"].dispatch),
        first_token_ratio=arms["one"].first_token.over(arms["two"].first_token),
        even=tuple(
            Even(n, _of(found, lambda b: b.dispatch_s), _of(found, lambda b: b.combine_s))
            for n, found in even.items()
        ),
    )
    _show(result, out)
    if json_path is not None:
        settings = {"setup": setup, "lengths": LENGTHS, "even_lengths": EVEN_LENGTHS, "question": QUESTION}
        gate = "answers of two workers and of a single server: same tokens, same logprobs bit for bit"
        found = report("segment-parallel", settings, result, gate=gate, threads=setup.threads)
        write_json(json_path, found)


def _gate(
    ask: Callable[[str, list[int]], Reply], router: str, combine: str, prompt: list[int], segments: int
) -> None:
    """Nothing is timed of something that is wrong."""
    spread, single = _spread(ask(router, prompt), segments), ask(combine, prompt)
    if not spread.same_as(single):
        raise ServerError(
            f"two workers answer {spread.tokens}, a single server {single.tokens}: "
            "expected equal tokens and logprobs"
        )


def _spread(reply: Reply, segments: int) -> Reply:
    """``reply``, if all of its segments were computed by workers for it."""
    found = reply.breakdown
    parts = () if found is None else found.segments or ()
    if (
        found is None
        or None in (found.dispatch_s, found.combine_s)
        or [p.source for p in parts] != ["dispatched"] * segments
    ):
        raise ServerError(f"workers did not compute all {segments} cold segments of a request: {found}")
    return reply


def _arm(replies: Sequence[Reply]) -> Arm:
    first_token = Spread.of([r.first_token_s for r in replies])
    if any(r.breakdown is None for r in replies):
        return Arm(first_token, None, None, None)
    dispatch = _of(replies, lambda b: b.dispatch_s)
    exposed = _of(replies, lambda b: b.exposed_transfer_s)
    return Arm(first_token, dispatch, exposed.over(dispatch), _of(replies, lambda b: b.combine_s))


def _of(replies: Sequence[Reply], value: Callable[[Breakdown], float | None]) -> Spread:
    values = [value(r.breakdown) for r in replies if r.breakdown is not None]
    return Spread.of([v for v in values if v is not None])


def _show(result: Speedup, out: Console) -> None:
    def timed(found: Spread | None) -> str:
        return (
            "" if found is None else f"{seconds(found.median)} ({seconds(found.min)} - {seconds(found.max)})"
        )

    names = {"two workers": result.two, "one worker": result.one, "a single server": result.single}
    rows = [
        ("dispatch", *(timed(arm.dispatch) for arm in names.values())),
        ("  of that exposed transfer", *(_share(arm.exposed) for arm in names.values())),
        ("combine", *(timed(arm.combine) for arm in names.values())),
        ("time to first token", *(timed(arm.first_token) for arm in names.values())),
    ]
    title = f"a cold prompt of {len(LENGTHS)} segments, {sum(LENGTHS)} tokens"
    out.print(table(title, ("", *names), rows))
    assert result.two.exposed is not None
    dispatch, first, exposed = result.dispatch_ratio, result.first_token_ratio, result.two.exposed
    targets = [
        ("dispatch, one worker / two", dispatch, f">= {DISPATCH_TARGET}", dispatch.median >= DISPATCH_TARGET),
        (
            "time to first token, one / two",
            first,
            f">= {FIRST_TOKEN_TARGET}",
            first.median >= FIRST_TOKEN_TARGET,
        ),
        ("exposed transfer / dispatch", exposed, f"< {EXPOSED_TARGET}", exposed.median < EXPOSED_TARGET),
    ]
    out.print(
        table(
            "targets",
            ("", "median", "min to max", "target", ""),
            [
                (name, f"{s.median:.3f}", f"{s.min:.3f} to {s.max:.3f}", target, "met" if met else "missed")
                for name, s, target, met in targets
            ],
        )
    )
    out.print(
        table(
            f"{len(LENGTHS)} equal segments, two workers",
            ("tokens each", "dispatch", "combine"),
            [(str(e.tokens), timed(e.dispatch), timed(e.combine)) for e in result.even],
        )
    )
    short, long = result.even[0], result.even[-1]
    out.print(
        f"Segments {long.tokens // short.tokens} times as long: dispatch "
        f"{long.dispatch.median / short.dispatch.median:.1f} times, "
        f"combine {long.combine.median / short.combine.median:.2f} times."
    )


def _share(found: Spread | None) -> str:
    return "" if found is None else f"{percent(found.median)} ({percent(found.min)} - {percent(found.max)})"


@click.command("segment-parallel", help="Two workers against one, and the cost of combining: five minutes.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model's folder.  Default: a random model.",
)
@click.option("--size", type=click.Choice(list(SIZES)), help="Size of the random model.  Default: 150m.")
@click.option("--threads", type=click.IntRange(1, 512), default=1, show_default=True, help="Per server.")
@click.option("--compile/--eager", "compiled", default=False, show_default=True, help="Compile the model.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def segment_parallel(
    model: Path | None,
    size: str | None,
    threads: int,
    compiled: bool,
    repeats: int,
    seed: int,
    json_path: Path | None,
) -> None:
    check_outputs(json_path, None)
    if model is not None and size is not None:
        raise click.UsageError("--model and --size: expected only one of the two")
    if model is not None:
        model_context(model)  # refuses a folder without a model
    out = console()
    if (cores := len(os.sched_getaffinity(0)) // threads) < 2:
        out.print(f"[bold yellow]{cores} core for two workers: the ratios mean nothing.[/]")
    setup = Setup(model or random_model(size or "150m"), threads=threads, eager=not compiled, context=CONTEXT)
    try:
        with Cluster(setup) as cluster:
            measure(cluster, setup, repeats=repeats, seed=seed, json_path=json_path, out=out)
    except (ServerError, httpx.HTTPError) as e:
        raise click.ClickException(f"{type(e).__name__}: {e}") from e
