"""The README and the tutorials of docs/start run as they are written, and the page of structures names every
folder."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from lib import forked
from lib.one_process import ONE_PROCESS

from benchmarks.lib.serving import Server, fast_dtype
from vllm_hypic.connector.metrics import COUNTERS, GAUGES

from .conftest import ENV

ROOT = Path(__file__).parents[3]
README, START = ROOT / "README.md", ROOT / "docs" / "start"
BOUND_S = 900.0
"""A script that starts an engine takes half a minute; beside twenty busy processes it took more than four."""
URL = "http://127.0.0.1:8000"
SMOLLM2 = "~/.cache/vllm-hypic/models/SmolLM2-135M-Instruct"
PACKAGES = {
    "langchain.md": ("langchain_classic", "langchain_openai"),
    "llamaindex.md": ("llama_index.core", "llama_index.llms.openai_like"),
}
"""What pages import that vLLM does not bring."""
EAGER = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
"""A script's engine compiles nothing."""
long = pytest.mark.timeout(BOUND_S + 60)


def blocks(page: Path, begin: str = "") -> dict[str, str]:
    """The fenced or indented blocks after ``<!-- tested: {begin}NAME -->``, by name."""
    block = rf"<!-- tested: {begin}(\w+) -->\n(?:```\w+\n(.*?)```|\n((?: {{4,}}[^\n]+\n)+))"
    found = re.findall(block, page.read_text(), re.DOTALL)
    blocks = {name: fenced or textwrap.dedent(indented) for name, fenced, indented in found}
    assert len(blocks) == len(found) > 0, page
    return blocks


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
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README.read_text()):
        assert (ROOT / link).exists(), link


@pytest.fixture(params=["eager", "as users start"])
def eager(request: pytest.FixtureRequest) -> bool:
    """Whether the engine compiles nothing and the server is forked, which spares most of the test's time."""
    if request.param != "eager":
        request.getfixturevalue("as_users_start")
    return request.param == "eager"


@pytest.mark.engine
@long
@pytest.mark.fast("eager")
def test_usage_prints_what_the_readme_says(tmp_path: Path, eager: bool):
    script, page = tmp_path / "usage.py", README.read_text()
    script.write_text(re.search(r"<!-- tested -->\n```\w+\n(.*?)```", page, re.DOTALL)[1])
    env = environment() | (EAGER if eager else {})
    ended = forked.run([sys.executable, script], cwd=ROOT, env=env, timeout=BOUND_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [line for line in ended.stdout.splitlines() if re.match(r" val\d+ \d+$", line)]
    assert printed == re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines()


@pytest.mark.engine
@long
@pytest.mark.fast("eager")
def test_server_and_client_commands(tmp_path: Path, eager: bool):
    page = blocks(README)
    model, options = served(page["server"])
    options += ["--enforce-eager"] if eager else []
    with Server(ROOT / model, *options, env=ENV, log=tmp_path / "server.log") as server:
        completion, *lines = printed(page["client"].replace(URL, server.url)).splitlines()
    assert json.loads(completion)["choices"][0]["text"].strip() == "val7"
    assert sum(line.startswith("vllm:hypic_") for line in lines) >= len(COUNTERS) + len(GAUGES)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Server]]:
    """The server of a command and the folder of its model: one for all pages that have the same command."""
    with ExitStack() as servers:

        @cache
        def started(command: str, model: Path) -> Server:
            _, options = served(command)
            options = [str(ROOT / o) if o.startswith("examples/") else o for o in options]
            log = tmp_path_factory.mktemp("tutorials") / "server.log"
            options += ["--dtype", fast_dtype()] if SMOLLM2.endswith(model.name) else []
            env = ENV | (ONE_PROCESS if "--enforce-eager" in options else {})
            return servers.enter_context(Server(model, *options, env=env, log=log))

        yield started


@pytest.mark.slow
@pytest.mark.engine
@long
def test_a_rag_server_prints_what_the_tutorial_says(
    serve: Callable[[str, Path], Server], tmp_path: Path, as_users_start: None
):
    page = blocks(START / "rag-server.md")
    model, _ = served(page["server"])
    server = serve(page["server"], ROOT / model)
    assert URL in page["program"]
    (tmp_path / "ask.py").write_text(page["program"].replace(URL, server.url))
    assert printed(page["client"], tmp_path) == page["output"]


@pytest.mark.slow
@pytest.mark.engine
@long
@pytest.mark.parametrize(
    ("page", "begin", "lines", "least"),
    [
        pytest.param(README, "structure ", 2, 1000, id="readme"),
        pytest.param(START / "chat-agent.md", "", 4, 4000, id="chat-agent"),
        pytest.param(START / "langchain.md", "", 2, 1000, id="langchain"),
        pytest.param(START / "llamaindex.md", "", 2, 1000, id="llamaindex"),
    ],
)
def test_unmodified_clients_reuse_what_the_page_says(
    serve: Callable[[str, Path], Server], smollm2: Path, page: Path, begin: str, lines: int, least: int
):
    """So many ``lines`` say how many tokens were reused: each but the first at ``least``."""
    for package in PACKAGES.get(page.name, ()):
        pytest.importorskip(package, reason=f"{package}: pip install 'vllm-hypic[integrations]'")
    found = blocks(page, begin)
    model, _ = served(found["server"])
    assert model == SMOLLM2 and URL in found["client"]
    said = printed(found["client"].replace(URL, serve(found["server"], smollm2).url))
    reused = [int(n) for n in re.findall(r"reused tokens: (\d+)$", said, re.MULTILINE)]
    assert len(reused) == lines and min(reused[1:]) > least, said
    if page.parent == START:
        assert f"more than {least:,} reused tokens" in " ".join(page.read_text().split())
