"""Plants known faults in the package, one at a time, and says which of them the tests find.

    python tools/mutate.py list
    python tools/mutate.py run
    python tools/mutate.py run transition-transposed --whole
    python tools/mutate.py run --select "" --jobs 2 --out results.json

The faults stand in ``tools/mutations.toml``.  Each is planted in a copy of the files that git tracks, as they
stand in this checkout; the checkout itself is never changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutations.toml"
PACKAGE = "vllm_hypic"
TRITON = "tests/cuda/triton"
"""These tests need a process of their own, in which Triton interprets its kernels."""
TIMEOUT_S = 900.0

FOUND, SURVIVED, ERROR = "found", "survived", "error"

_PASSED, _FAILED, _INTERRUPTED, _INTERNAL, _USAGE, _NO_TESTS = range(6)
"""Exit codes of pytest."""
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?)(?: - .*)?$", re.MULTILINE)
_STOP_S = 10.0
"""Seconds that tests have to end once they are told to."""


class MutationError(ValueError):
    """A fault that cannot be planted, or a list that makes no sense; the message names the fault."""


@dataclass(frozen=True)
class Mutation:
    """One fault: in ``file``, ``old``, which stands there exactly once, becomes ``new``.

    ``tests``: files or node ids of pytest that should find it, the quickest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """``text``, which is that of ``file``, with the fault.  Raises :class:`MutationError`."""
        times = text.count(self.old)
        if times != 1:
            raise MutationError(
                f"{self.name}: its old text stands {times} times in {self.file}: expected exactly once"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of one fault.  ``test``: the node id that failed first, where one did; ``note``: what else
    there is to say."""

    name: str
    outcome: str
    seconds: float
    test: str = ""
    note: str = ""


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The faults in a list.  Raises :class:`MutationError` for one that lacks something, or a name that
    stands there twice."""
    found: list[Mutation] = []
    for number, entry in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["mutation"], 1):
        name = entry.get("name") or f"number {number}"
        try:
            made = Mutation(**{**entry, "tests": tuple(entry["tests"])})
        except (KeyError, TypeError) as e:
            raise MutationError(f"{name}: expected name, file, old, new and tests: {e}") from e
        if made.name in {other.name for other in found}:
            raise MutationError(f"{name}: another fault has this name")
        if made.old == made.new or not made.tests:
            raise MutationError(f"{name}: expected a new text that differs from old, and at least one test")
        found.append(made)
    return found


# -- a copy of the checkout ------------------------------------------------------------------------------


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tracked files and of what was built of the C++ kernels, while this lasts."""
    with tempfile.TemporaryDirectory(prefix="hypic-mutation-") as folder:
        copy = Path(folder)
        for name in _tracked():
            source = ROOT / name
            if source.is_symlink() or source.is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy / name, follow_symlinks=False)
        for built in (ROOT / PACKAGE).glob("_C*.so"):
            shutil.copy2(built, copy / PACKAGE / built.name)
        yield copy


@cache
def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name]


# -- tests -----------------------------------------------------------------------------------------------


class Runner:
    """Runs pytest in copies, in any number of threads.  :meth:`stop` ends all that is under way."""

    def __init__(self, select: str, timeout_s: float, *, whole: bool) -> None:
        """``select``: pytest's ``-m``; ``whole``: all tests, not those that faults name."""
        self._select, self._timeout_s, self._whole = select, timeout_s, whole
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, mutation: Mutation) -> Result:
        """Plant a fault and look for it.  Raises :class:`MutationError` where it cannot be planted."""
        begun = time.monotonic()
        with copied() as copy:
            file = copy / mutation.file
            if not file.is_file():
                raise MutationError(f"{mutation.name}: there is no file {mutation.file}")
            file.write_text(mutation.planted(file.read_text(encoding="utf-8")), encoding="utf-8")
            tests = ("tests",) if self._whole else mutation.tests
            until, faults = begun + self._timeout_s, list[str]()
            for part in parts(tests):
                outcome, test, note = self._look(copy, part, until)
                if outcome == FOUND:
                    return Result(mutation.name, FOUND, time.monotonic() - begun, test, note)
                if outcome == ERROR:
                    faults.append(note)
        seconds = time.monotonic() - begun
        if faults:
            return Result(mutation.name, ERROR, seconds, note="; ".join(faults))
        return Result(mutation.name, SURVIVED, seconds)

    def _look(self, copy: Path, part: Part, until: float) -> tuple[str, str, str]:
        """Outcome, failed test and note of one process of pytest."""
        code, output = self._pytest(copy, part, until)
        failed = _SUMMARY.search(output)
        test = failed[1] if failed else ""
        if code is None:
            return FOUND, test, f"the tests did not end within {self._timeout_s:g} s"
        if code == _PASSED:
            return SURVIVED, "", ""
        if code == _FAILED:
            return FOUND, test, ""
        if code < 0:
            return FOUND, test, f"the tests' process died of signal {-code}"
        if code == _NO_TESTS:
            return ERROR, "", f"no tests were selected of {' '.join(part.tests)}"
        if code in (_INTERRUPTED, _INTERNAL, _USAGE) and self._collects(part):
            return FOUND, test, "the tests cannot be collected"
        return ERROR, "", f"pytest ended with {code}: {_last_line(output)}"

    def _collects(self, part: Part) -> bool:
        """Whether these tests can be collected without a fault."""
        with copied() as copy:
            code, _ = self._pytest(copy, part, time.monotonic() + self._timeout_s, "--collect-only")
        return code == _PASSED

    def _pytest(self, copy: Path, part: Part, until: float, *more: str) -> tuple[int | None, str]:
        """Exit code and output; ``None``: it did not end in time."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *more]
        command += ["-m", self._select] if self._select else []
        environment = {**os.environ, "PYTHONPATH": str(copy), **part.environment}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            with self._lock:
                if self._stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    [*command, *part.options, *part.tests],
                    cwd=copy,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # what tests start ends with them
                    text=True,
                )
                self._running.add(process)
            code: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, until - time.monotonic()))
            finally:
                _end(process)
                with self._lock:
                    self._running.discard(process)
            output.seek(0)
            return code, output.read()

    def stop(self) -> None:
        """Begin nothing more, and end what is under way."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)


@dataclass(frozen=True)
class Part:
    """Tests that are run by one process."""

    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    interpreted: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {"TRITON_INTERPRET": "1"} if self.interpreted else {}


def parts(tests: Sequence[str]) -> list[Part]:
    """``tests`` by the process that they need, in their order."""
    of_triton = tuple(test for test in tests if _is_of_triton(test))
    others = tuple(test for test in tests if not _is_of_triton(test))
    found = []
    if others:
        # Without the variable that folder has no tests, but all of it would be read.
        found.append(Part(others, (f"--ignore={TRITON}",) if "tests" in others else ()))
    if of_triton or "tests" in others:
        found.append(Part(of_triton or (TRITON,), interpreted=True))
    if tests and _is_of_triton(tests[0]):
        found.reverse()
    return found


def _is_of_triton(test: str) -> bool:
    return test == TRITON or test.startswith(f"{TRITON}/")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started, if it has not ended."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "pytest printed nothing"


# -- the command -----------------------------------------------------------------------------------------


@click.group()
def main() -> None:
    """Plant known faults in the package, one at a time, and say which of them the tests find.

    The faults stand in tools/mutations.toml. Each is planted in a copy of the files that git tracks; this
    checkout is never changed.
    """


@main.command("list")
def list_mutations() -> None:
    """List the faults, the file of each, and the test that should find it first."""
    table = Table("fault", "file", "found by", box=None)
    for mutation in _read():
        table.add_row(mutation.name, mutation.file, mutation.tests[0])
    _console().print(table)


@main.command()
@click.argument("names", nargs=-1)
@click.option(
    "--tests-only/--whole",
    "tests_only",
    default=True,
    help="Run the tests that each fault names (the default), or all tests.",
)
@click.option(
    "--select",
    default="not slow",
    show_default=True,
    help='Run only tests with these marks, as pytest\'s -m does; "" runs slow tests, too.',
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Faults to try at a time."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds for one fault. Tests that take longer count as having found the fault.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here, as JSON."
)
def run(
    names: tuple[str, ...], tests_only: bool, select: str, jobs: int, timeout: float, out: Path | None
) -> None:
    """Plant each of the faults called NAMES, by default all, in a copy of the package and run tests there.

    A fault is found when a test fails, or when tests that can be collected without it cannot be with it. It
    has survived when all tests pass. Anything else, such as a test that does not exist, is an error. The exit
    status is 1 unless every fault was found.
    """
    mutations = _chosen(names)
    runner = Runner(select, timeout, whole=not tests_only)
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, _interrupt)
    results: dict[str, Result] = {}

    def done(result: Result) -> None:
        results[result.name] = result
        click.echo(f"{len(results)}/{len(mutations)} {result.name}: {_said(result)}")
        if out is not None:
            ordered = [asdict(results[m.name]) for m in mutations if m.name in results]
            out.write_text(
                json.dumps({"select": select, "whole": not tests_only, "results": ordered}, indent=2)
            )

    _run_all(mutations, runner, jobs, done)
    _console().print(_table([results[mutation.name] for mutation in mutations]))
    found = sum(result.outcome == FOUND for result in results.values())
    click.echo(f"{found} of {len(mutations)} faults were found.")
    sys.exit(found < len(mutations))


def _run_all(
    mutations: Sequence[Mutation], runner: Runner, jobs: int, done: Callable[[Result], None]
) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        under_way = {pool.submit(runner.run, mutation): mutation for mutation in mutations}
        try:
            for future in as_completed(under_way):
                try:
                    done(future.result())
                except MutationError as e:
                    done(Result(under_way[future].name, ERROR, 0.0, note=str(e)))
        except BaseException:
            # Each thread removes its copy.
            for future in under_way:
                future.cancel()
            runner.stop()
            raise


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _read() -> list[Mutation]:
    try:
        return read_mutations()
    except MutationError as e:
        raise click.ClickException(str(e)) from e


def _chosen(names: Sequence[str]) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in _read()}
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(
            f"no fault is called {unknown[0]!r}; see the command list", param_hint="NAMES"
        )
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _said(result: Result) -> str:
    said = f"{result.outcome} after {result.seconds:.0f} s"
    return said + "".join(f", {more}" for more in (result.test, result.note) if more)


def _table(results: Sequence[Result]) -> Table:
    table = Table("fault", "outcome", "seconds", "first failed test", box=None)
    colours = {FOUND: "green", SURVIVED: "red", ERROR: "yellow"}
    for result in results:
        outcome = f"[{colours[result.outcome]}]{result.outcome}[/]"
        what = ", ".join(text for text in (result.test, result.note) if text)
        table.add_row(result.name, outcome, f"{result.seconds:.0f}", what.replace("[", r"\["))
    return table


def _console() -> Console:
    """Lines are as long as they are where nobody watches."""
    return Console() if sys.stdout.isatty() else Console(width=240)


if __name__ == "__main__":
    main()
