"""The tutorials of docs/start, and the README's part without separators, run as they are written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from lib.one_process import ONE_PROCESS

from benchmarks.lib.serving import Server, fast_dtype

from .conftest import ENV
from .test_readme import BOUND_S, ROOT, printed, served

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(BOUND_S + 60)]

START = ROOT / "docs" / "start"
URL = "http://127.0.0.1:8000"
SMOLLM2 = "~/.cache/vllm-hypic/models/SmolLM2-135M-Instruct"
PACKAGES = {
    "langchain.md": ("langchain_classic", "langchain_openai"),
    "llamaindex.md": ("llama_index.core", "llama_index.llms.openai_like"),
}
"""What pages import that vLLM does not bring."""


def blocks(page: Path, begin: str = "") -> dict[str, str]:
    """The fenced or indented blocks after ``<!-- tested: {begin}NAME -->``, by name."""
    block = rf"<!-- tested: {begin}(\w+) -->\n(?:```\w+\n(.*?)```|\n((?: {{4,}}[^\n]+\n)+))"
    found = re.findall(block, page.read_text(), re.DOTALL)
    blocks = {name: fenced or textwrap.dedent(indented) for name, fenced, indented in found}
    assert len(blocks) == len(found) > 0, page
    return blocks


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


def test_a_rag_server_prints_what_the_tutorial_says(
    serve: Callable[[str, Path], Server], tmp_path: Path, as_users_start: None
):
    page = blocks(START / "rag-server.md")
    model, _ = served(page["server"])
    server = serve(page["server"], ROOT / model)
    assert URL in page["program"]
    (tmp_path / "ask.py").write_text(page["program"].replace(URL, server.url))
    assert printed(page["client"], tmp_path) == page["output"]


@pytest.mark.parametrize(
    ("page", "begin", "lines", "least"),
    [
        pytest.param(ROOT / "README.md", "structure ", 2, 1000, id="readme"),
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
    server = serve(found["server"], smollm2)
    said = printed(found["client"].replace(URL, server.url))
    reused = [int(n) for n in re.findall(r"reused tokens: (\d+)$", said, re.MULTILINE)]
    assert len(reused) == lines and min(reused[1:]) > least, said
    if page.parent == START:
        assert f"more than {least:,} reused tokens" in " ".join(page.read_text().split())
