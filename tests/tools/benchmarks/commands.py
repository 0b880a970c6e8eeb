"""Runs commands of the benchmarks in this process, and reads what they print and write."""

import json
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from benchmarks.__main__ import main
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.probes.__main__ import main as probes

GROUPS: dict[str, click.Group] = {"gpu": gpu, "probes": probes}


def run(*arguments: object) -> Result:
    """``arguments``: of ``python -m benchmarks``, or of its package ``gpu`` or ``probes``, named first."""
    first, *others = map(str, arguments)
    if first in GROUPS:
        return CliRunner().invoke(GROUPS[first], others)
    return CliRunner().invoke(main, [first, *others])


def failed(*arguments: object) -> str:
    """The output of a command that fails."""
    done = run(*arguments)
    assert done.exit_code == 1, (done.output, done.exc_info)
    return done.output


def words(done: Result) -> str:
    """The output without its line breaks and frames."""
    return " ".join(done.output.split())


def measured(folder: Path, *arguments: object, plot: bool = True) -> tuple[str, dict[str, Any]]:
    """The output of a command that succeeds, and its report; ``plot``: it draws a picture, too."""
    report, picture = folder / "report.json", folder / "plot.png"
    done = run(*arguments, "--json", report, *(("--plot", picture) if plot else ()))
    assert done.exit_code == 0, (done.output, done.exc_info)
    if plot:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 1000
    return done.output, json.loads(report.read_text())
