"""Reports of benchmarks as JSON: machine, versions, command, settings, results; and options for their files.

The functions of ``vllm_hypic.harness.report`` that show tables and numbers can be called by this module, too.
The module imports neither torch nor vLLM, because a load generator needs neither.
"""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_hypic.files import whole_file
from vllm_hypic.harness.report import Steps as Steps
from vllm_hypic.harness.report import console as console
from vllm_hypic.harness.report import machine, three_digits, versions
from vllm_hypic.harness.report import percent as percent
from vllm_hypic.harness.report import plain as plain
from vllm_hypic.harness.report import progress as progress
from vllm_hypic.harness.report import size as size
from vllm_hypic.harness.report import table as table

if TYPE_CHECKING:
    from vllm_hypic.harness.engines import Engine

FORMAT = 1
"""Version of the JSON's layout, raised when a reader of older files would misread newer files."""
COLOURS = {"stock": "#7f7f7f", "prefix": "#1f77b4", "cold": "#ff7f0e", "warm": "#2ca02c", "naive": "#d62728"}
"""Colours that mean the same in every plot; other series take matplotlib's colours."""
REPORT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
"""Type of an option that names a file to write."""


def report(
    benchmark: str,
    settings: Any,
    results: Any,
    *,
    gate: Any = None,
    threads: int | None = None,
    module: str = "benchmarks",
) -> dict[str, Any]:
    """Return all facts needed to judge and to repeat a measurement, as plain JSON values.

    ``settings``, ``results`` and ``gate`` (the checks before any time was taken) may hold dataclasses and
    paths at any depth.  ``module``: the module that ``python -m`` runs.
    """
    return plain(
        {
            "format": FORMAT,
            "benchmark": benchmark,
            "command": command(module),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(threads),
            "versions": versions(),
            "settings": settings,
            "gate": gate,
            "results": results,
        }
    )


def command(module: str = "benchmarks") -> str:
    """Return the command line as a user would type it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def described(*engines: Engine) -> dict[str, dict[str, Any]]:
    """Return the settings of each engine by name, for reports."""
    return {engine.name: engine.described for engine in engines}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, so that a reader never sees half a file."""
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    with whole_file(path) as file:
        file.write(text)


def seconds(value: float) -> str:
    """Format seconds with three significant digits in a fitting unit: ``5.92 s``, ``232 ms``, ``41.5 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * scale >= 1 or unit == "us":
            return f"{three_digits(value * scale)} {unit}"
    raise AssertionError("unreachable")


def output_options(command: Any) -> Any:
    """Add the options ``--json FILE`` and ``--plot FILE``, which the command gets as ``json_path`` and
    ``plot_path``.

    The command checks both before it measures (:func:`check_outputs`).
    """
    for option in (
        click.option("--plot", "plot_path", type=REPORT_FILE, help="Also draw the results in this PNG file."),
        click.option("--json", "json_path", type=REPORT_FILE, help="Also write a report to this JSON file."),
    ):
        command = option(command)
    return command


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ``click.UsageError`` for paths whose use would fail only after the measurement."""
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path}: there is no folder {path.absolute().parent}")
    if plot_path is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as e:
            raise click.UsageError(
                "--plot needs matplotlib: python -m pip install 'vllm-hypic[bench]' "
                "(or: pip install matplotlib)"
            ) from e
        if plot_path.suffix != ".png":
            raise click.UsageError(f"--plot {plot_path}: plots are PNG files, use {plot_path.stem}.png")
