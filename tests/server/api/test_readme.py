"""README does what it says, and the page of structures names every folder."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from lib import forked

from benchmarks.lib.serving import Server
from vllm_hypic.connector.metrics import COUNTERS, GAUGES

from .conftest import ENV

ROOT = Path(__file__).parents[3]
BOUND_S = 900.0
"""A script that starts an engine takes half a minute; beside twenty busy processes it took more than four."""
README = (ROOT / "README.md").read_text()


def block(mark: str) -> str:
    """The fenced block after ``<!-- mark -->``."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, mark
    return found.group(1)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"LANGCHAIN_TRACING_V2": "False", "ANONYMIZED_TELEMETRY": "False"}
    return {**os.environ, **ENV, **quiet, "PATH": path}


def served(command: str) -> tuple[str, list[str]]:
    """Model and options of a ``vllm serve`` that may go over several lines."""
    vllm, serve, model, *options = shlex.split(command.replace("\\\n", " "))
    assert (vllm, serve) == ("vllm", "serve")
    return model, options


def printed(script: str, folder: Path = ROOT) -> str:
    """What a user's shell prints who runs ``script`` in ``folder``, in this environment."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    options = {"env": environment(), "timeout": BOUND_S, "capture_output": True, "text": True}
    ended = subprocess.run(command, cwd=folder, **options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_folders_and_files_that_are_named_exist():
    structures = (ROOT / "docs" / "how-it-works" / "structures.md").read_text()
    for folder in sorted(p.parent.name for p in (ROOT / "vllm_hypic").glob("*/__init__.py")):
        assert f"{folder}/" in structures, folder
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.engine
@pytest.mark.timeout(BOUND_S + 60)
def test_usage_prints_what_the_readme_says(tmp_path):
    script = tmp_path / "usage.py"
    script.write_text(block("tested"))
    ended = forked.run([sys.executable, script], cwd=ROOT, env=environment(), timeout=BOUND_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert expected
    printed = [line for line in ended.stdout.splitlines() if re.match(r" val\d+ \d+$", line)]
    assert printed == expected.group(1).splitlines()


@pytest.mark.engine
@pytest.mark.timeout(BOUND_S + 60)
def test_server_and_client_commands(tmp_path, as_users_start):
    model, options = served(block("tested: server"))
    with Server(ROOT / model, *options, env=ENV, log=tmp_path / "server.log") as server:
        script = block("tested: client").replace("http://127.0.0.1:8000", server.url)
        completion, *lines = printed(script).splitlines()
    assert json.loads(completion)["choices"][0]["text"].strip() == "val7"
    assert sum(line.startswith("vllm:hypic_") for line in lines) >= len(COUNTERS) + len(GAUGES)
