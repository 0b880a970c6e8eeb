"""Requests with many segment ids: each step of the engine looks up a bounded number of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_hypic.cache_api import handler as handler_module
from vllm_hypic.cache_api.answers import Place
from vllm_hypic.cache_api.commands import (
    MOST_IDS,
    MOST_RESOLVED,
    Resolve,
    Resolved,
    pack,
    unpack,
)
from vllm_hypic.cache_api.control import CommandFailed, Control
from vllm_hypic.cache_api.handler import CommandHandler
from vllm_hypic.cache_api.registry import SegmentRegistry

from .test_handler import Records


class Line(Control):
    """To a handler in this process, without an engine between."""

    def __init__(self, handler: CommandHandler) -> None:
        self.handler = handler
        self.looked_up: list[int] = []
        """Ids of each command that were looked up."""

    async def send(self, command: Any, wanted: Any, salt: str | None) -> Any:
        answer = unpack(pack(self.handler.execute(command, salt)), wanted)
        assert isinstance(answer, Resolved)
        self.looked_up.append(len(answer.contents) + len(answer.unknown))
        return answer


@pytest.fixture
def registry() -> SegmentRegistry:
    return SegmentRegistry(None, "namespace")


@pytest.fixture
def line(registry: SegmentRegistry) -> Line:
    return Line(CommandHandler(lambda: registry, Records(), str))


def ids_of(registry: SegmentRegistry, count: int, n_tokens: int = 3) -> list[str]:
    return [registry.add("me", Place.INTERIOR, [i] * n_tokens, text=f"text {i}").id for i in range(count)]


def test_one_command_looks_up_so_many(registry: SegmentRegistry, line: Line) -> None:
    ids = ids_of(registry, 3 * MOST_RESOLVED)
    found = line.handler.execute(Resolve(ids), "me")
    assert isinstance(found, Resolved) and list(found.contents) == ids[:MOST_RESOLVED]
    unknown = line.handler.execute(Resolve([f"no {i}" for i in range(1000)]), "me")
    assert isinstance(unknown, Resolved) and len(unknown.unknown) == MOST_RESOLVED


def test_long_segments_are_fewer_and_never_none(
    registry: SegmentRegistry, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_module, "MOST_RESOLVED_TOKENS", 100)
    ids = ids_of(registry, 5, n_tokens=60)
    found = asyncio.run(line.resolve(ids, "me"))
    assert list(found.contents) == ids and line.looked_up == [2, 2, 1]
    line.looked_up.clear()
    longer = ids_of(registry, 2, n_tokens=1000)
    assert list(asyncio.run(line.resolve(longer, "me")).contents) == longer and line.looked_up == [1, 1]


def test_all_of_a_request_are_found_in_several_commands(registry: SegmentRegistry, line: Line) -> None:
    ids = ids_of(registry, 2 * MOST_RESOLVED + 7)
    found = asyncio.run(line.resolve(ids, "me"))
    assert [c.text for c in found.contents.values()] == [f"text {i}" for i in range(len(ids))]
    assert line.looked_up == [MOST_RESOLVED, MOST_RESOLVED, 7]


def test_the_first_unknown_ones_end_it(registry: SegmentRegistry, line: Line) -> None:
    ids = ids_of(registry, 3 * MOST_RESOLVED)
    ids[MOST_RESOLVED + 1] = "nobody"
    assert asyncio.run(line.resolve(ids, "me")).unknown == ["nobody"]
    assert len(line.looked_up) == 2
    assert len(asyncio.run(line.resolve(ids, "you")).unknown) == MOST_RESOLVED


def test_too_many_are_refused_before_any_is_looked_up(line: Line) -> None:
    says = f"{MOST_IDS + 1} segment ids .*: expected at most {MOST_IDS}"
    with pytest.raises(CommandFailed, match=says) as refused:
        asyncio.run(line.resolve([f"id {i}" for i in range(MOST_IDS + 1)], "me"))
    assert refused.value.status == 400 and line.looked_up == []
