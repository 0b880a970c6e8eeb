"""Command line of the benchmarks."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


@click.group(help="Benchmarks of vllm-hypic on the real engine.")
def main() -> None:
    pass


@main.command(help="First token: stock vLLM, cold, warm; one engine each, taking turns.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A model's folder.")
@click.option("--size", type=click.Choice(["tiny", "150m", "400m"]), default="150m", show_default=True,
              help="Size of the random Qwen3.5-shaped model when no model is given.")
@click.option("--segments", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(64, 65536), default=2048, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1, 512), default=None, help="OpenMP threads; default: all cores.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write results here.")
def ttft(
    model: Path | None, size: str, segments: int, tokens: int, repeats: int, threads: int | None, json_path: Path | None
) -> None:
    import os

    from .sizes import random_model
    from .ttft import GateFailed, TtftSettings, run

    console = Console()
    model = model or random_model(size)
    threads = threads or len(os.sched_getaffinity(0))
    settings = TtftSettings(model, segments, tokens, repeats, threads)
    with console.status("measuring"):
        try:
            result = run(settings)
        except GateFailed as e:
            raise click.ClickException(f"correctness gate: {e}") from e

    table = Table(title=f"first token, {segments} segments x {tokens} tokens, {model.name}")
    for column in ("", "median", "min", "max", "x stock"):
        table.add_column(column, justify="right" if column else "left")
    stock = result.median("stock")
    for name, label in (("stock", "stock vLLM"), ("cold", "hypic, cold"), ("warm", "hypic, warm")):
        times, median = getattr(result, name), result.median(name)
        table.add_row(label, f"{median:.3f} s", f"{min(times):.3f} s", f"{max(times):.3f} s", f"{stock / median:.2f}")
    console.print(table)
    console.print(f"{result.reused_tokens} of {result.prompt_tokens} prompt tokens reused; cold and warm bit-identical")
    if json_path is not None:
        import vllm

        report = {
            "command": shlex.join([Path(sys.executable).name, "-m", "vllm_hypic.bench", *sys.argv[1:]]),
            "settings": {**asdict(settings), "model": str(model)},
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": threads, "vllm": vllm.__version__},
            "seconds": {k: getattr(result, k) for k in ("stock", "cold", "warm")},
            "speedup_warm": result.speedup,
        }
        json_path.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
