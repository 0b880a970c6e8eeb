"""Every example runs and gives the right answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lib import forked
from one_process import ONE_PROCESS

from .conftest import ENV

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    env = {**os.environ, **ENV, **ONE_PROCESS}
    ended = forked.run(command, env=env, timeout=540)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [line for line in ended.stdout.splitlines() if "answer:" in line]


def right(line: str) -> bool:
    answer, expected = line.split("answer:")[1].split("(expected: ")
    return answer.split() == expected.split(")")[0].split()


@pytest.mark.engine
@pytest.mark.parametrize(("example", "answers"), [("offline.py", 3), ("chat.py", 2), ("async_llm.py", 2)])
@pytest.mark.fast("offline.py-3")
def test_example(example, answers):
    lines = run(example)
    assert len(lines) == answers and all(map(right, lines)), lines
    if example != "async_llm.py":
        assert lines[0].endswith("reused tokens: 0")
        assert all(line.endswith("reused tokens: 896") for line in lines[1:])


def test_client(server):
    lines = run("client.py", server.url)
    assert len(lines) == 5 and all(map(right, lines)), lines
    reused = [int(line.rsplit(" ", 1)[1]) for line in lines]
    assert reused == [896, 896, 0, 0, 0]
