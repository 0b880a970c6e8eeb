"""Checkpoints that come from a disk tier: engines that were restarted, engines that share the tier."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, audit, metrics, same, store_of

PAGE = 16
OPTIONS = {"prefix": "sparse", "page_tokens": PAGE, "context": "none", "islands": "none"}
SYSTEM, ONE, TWO, THREE, FOUR = random_segments([70, 150, 133, 90, 161], vocab=480, seed=31)
TURNS = [[*SYSTEM, *ONE], [*SYSTEM, *ONE, *TWO], [*SYSTEM, *ONE, *TWO, *THREE]]
"""Prompts of a conversation."""


class Start(Protocol):
    def __call__(self, **store: Any) -> AbstractContextManager[Engine]: ...


@pytest.fixture(params=["hybrid", "attention"])
def start(request: pytest.FixtureRequest, start_engine: EngineFactory, tmp_path: Path) -> Start:
    """Starts an engine over the test's disk tier, anew each time."""
    model = request.getfixturevalue(f"{request.param}_model")

    def starts(**store: Any) -> AbstractContextManager[Engine]:
        tier = {"type": "disk", "path": str(tmp_path), "bytes": 64 << 20} | store
        options = OPTIONS | {"store": {"tiers": [tier]}}
        return start_engine(model, max_logprobs=-1, disable_log_stats=False, options=options)

    return starts


def ask(engine: Engine, tokens: list[int], salt: str | None = None) -> Answer:
    return engine.ask(Ask(tuple(tokens), 4, sampling={"logprobs": -1}, salt=salt))[0]


def written(llm: Any) -> None:
    assert store_of(llm).drain(30)


def pages(tokens: list[int]) -> int:
    """Tokens of a prompt's record."""
    return (len(tokens) - 1) // PAGE * PAGE


def test_a_conversation_goes_on_after_a_restart(start: Start) -> None:
    with start() as engine:
        first = ask(engine, TURNS[0])
        assert first.cached == 0
        engine.call(written)
    with start() as engine:
        assert ask(engine, TURNS[1], salt="b").cached == 0, "another tenant's"
        found = [first, ask(engine, TURNS[1])]
        assert found[1].cached == pages(TURNS[0])
        assert engine.call(metrics)["vllm:hypic_tokens_resumed"] == pages(TURNS[0])
        found.append(ask(engine, TURNS[2]))
        assert found[2].cached == pages(TURNS[1])
        engine.reset()
        assert all(same(*pair) for pair in zip(found, [ask(engine, t) for t in TURNS], strict=True))
        assert engine.call(audit).clean
