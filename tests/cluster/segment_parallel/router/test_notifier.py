"""The router's messages to receivers: a dead receiver delays nothing else."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hypic.segment_parallel.router import notifier
from vllm_hypic.segment_parallel.router.metrics import RouterMetrics
from vllm_hypic.segment_parallel.router.notifier import ReceiverNotifier

DEAD, WELL = (f"tcp://127.0.0.1:{port}" for port in (7100, 7200))
CALLS = 100
"""More than an event loop has threads of its own."""


def node(receiver: str) -> Any:
    return SimpleNamespace(description=SimpleNamespace(receiver=receiver, ranks=1, namespace="n" * 64))


@pytest.mark.timeout(60)
async def test_a_dead_receiver_delays_neither_others_nor_the_loops_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, told = threading.Event(), list[str]()

    def tell(url: str, *_: object) -> None:
        if url == DEAD:
            answers.wait()
        told.append(url)

    monkeypatch.setattr(notifier, "withdraw", tell)
    ours = ReceiverNotifier(None, RouterMetrics([]))
    waiting = [asyncio.create_task(ours.withdraw(node(DEAD), ["ab" * 32])) for _ in range(CALLS)]
    try:
        await ours.withdraw(node(WELL), ["ab" * 32])
        assert await asyncio.to_thread(lambda: told) == [WELL]
    finally:
        answers.set()
    await asyncio.gather(*waiting)
    assert len(told) == CALLS + 1
