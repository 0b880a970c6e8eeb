"""Traces of prompts that begin alike, as options of the benchmarks that replay them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.settings import with_options

from .prefix_traces import PREFIX_KINDS, PrefixKind, Turn, generate, load
from .trace import TraceError


def trace_options(requests: int, *, least: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--kind``, ``--trace``, ``--chunk``, ``--requests``, ``--seed``: which prompts are asked."""
    options = (
        click.option(
            "--kind", "kinds", type=click.Choice(PREFIX_KINDS), multiple=True, help="[default: all]"
        ),
        click.option(
            "--trace",
            "files",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            multiple=True,
            help="ShareGPT's JSON, vLLM's timed traces, or traces of `eviction`, not generated traces.",
        ),
        click.option(
            "--chunk", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a hash_id."
        ),
        click.option(
            "--requests",
            type=click.IntRange(least),
            default=requests,
            show_default=True,
            help="Requests of each trace; `prefix` replays whole files.",
        ),
        click.option(
            "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the generators."
        ),
    )
    return lambda command: with_options(command, *options)


def asked_traces(
    kinds: Sequence[PrefixKind], files: Sequence[Path], chunk: int, requests: int, seed: int
) -> dict[str, list[Turn]]:
    """Requests by trace, those of files whole; click's errors for what cannot be read."""
    if files and kinds:
        raise click.UsageError("--trace and --kind: expected only one of the two")
    try:
        traces = {path.stem: load(path, chunk, seed) for path in files}
    except TraceError as e:
        raise click.ClickException(str(e)) from e
    return traces or {kind: generate(kind, requests, seed) for kind in kinds or PREFIX_KINDS}
