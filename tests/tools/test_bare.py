"""What is to be run first on a GPU runs where neither vLLM nor the package's own requirements are."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from lib.bare import hidden

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGE, SECTION = "docs/benchmarks/gpu.md", "Commands"
RUN = re.compile(r"^    .*?\bpython -m pytest (.*?)(?:\s+#.*)?$", re.MULTILINE)
LEFT_OUT = {
    "tests/cuda/moving/test_cuda_copies.py",
    "tests/cuda/moving/test_cuda_moving.py",
    "tests/cuda/moving/test_two_instances.py",
    "tests/unit/linear/test_mamba2_stock.py",
}
"""Test files that need more, and say so."""


def commands() -> list[str]:
    """Arguments of pytest in the section's indented lines."""
    text = (ROOT / PAGE).read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    return list(dict.fromkeys(RUN.findall(text)))


def run(*arguments: str) -> str:
    """What ``python -m`` with these arguments prints, with little installed."""
    command = [sys.executable, str(ROOT / "tests" / "lib" / "bare.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.fast("-o addopts= tests/unit/linear")
@pytest.mark.parametrize("arguments", [*commands(), "-o addopts= tests/unit/linear"])
def test_no_test_file_is_left_out_for_what_it_imports(arguments: str) -> None:
    options = shlex.split(arguments)
    printed = run("pytest", *options, "--collect-only", "-q").splitlines()
    found = {line.partition("::")[0] for line in printed if "::" in line}
    folders = [ROOT / path for path in options if path.startswith("tests/")]
    there = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("test_*.py")}
    ignored = {path.removeprefix("--ignore=") for path in options}
    assert found == there - ignored - LEFT_OUT != set()


def test_the_benchmarks_begin() -> None:
    run("benchmarks.gpu", "--help")


def test_records_move() -> None:
    printed = run("pytest", "-o", "addopts=", "-q", "tests/cuda/moving")
    assert "5 passed" in printed and "only what a GPU runs itself" in printed


def test_little_is_there() -> None:
    """The tests above are about something."""
    missing = set(hidden())
    assert {"vllm", "pydantic", "re2", "pytest_asyncio", "transformers", "zmq", "msgspec"} <= missing
    assert missing.isdisjoint({"torch", "triton", "numpy", "pytest", "hypothesis", "rich", "vllm_hypic"})
    assert len(commands()) == 2
