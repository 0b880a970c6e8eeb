"""KV events name the blocks of plain requests, as a stock engine's events do, and no other blocks."""

import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from lib.oracle.models import random_segments

from .conftest import EngineFactory
from .engines import Ask, all_same, drain, prompt, scheduler_of
from .test_exactness import ranged

PLAIN, OTHER, LAST, QUERY = random_segments([1500, 1300, 1200, 1600], vocab=480, seed=97)
ONE, TWO = random_segments([900, 180], vocab=480, seed=98)
EVENTS: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
EVENTS |= {"endpoint": "inproc://events", "replay_endpoint": "inproc://replay"}
EVENTS = {"kv_events_config": EVENTS, "max_num_batched_tokens": 640}


def batches(llm: Any, last: list[int]) -> list[bytes]:
    """All that was published, up to the blocks of the prompt ``last``."""
    import zmq

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect("inproc://replay")
            socket.send_multipart([b"", bytes(8)])
            found = []
            while True:
                *_, number, payload = socket.recv_multipart()
                if number == b"\xff" * 8:
                    break
                found.append(payload)
        if any(event.get("token_ids", [])[:16] == last[:16] for event in decoded(found)):
            return found
        time.sleep(0.05)
    raise TimeoutError("the last prompt's blocks were not published")


def decoded(payloads: list[bytes]) -> list[dict[str, Any]]:
    import msgspec

    return [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]


def published(llm: Any, last: list[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """The events, and which secrets of the engine are in their bytes."""
    drain(llm)
    scheduler = scheduler_of(llm)
    publisher = scheduler.kv_event_publisher
    getattr(publisher, "_publisher", publisher)._event_queue.join()  # all is in the replay buffer
    payloads = batches(llm, last)
    secrets = {"salt": "hypic:"}
    if hasattr(scheduler, "hypic"):
        secrets |= {"secret": scheduler._secret, "tenant": scheduler._tenant("mine")}
    return decoded(payloads), [name for name, text in secrets.items() if text.encode() in b"".join(payloads)]


PLAIN_ASKS = [Ask(tuple(t), salt=salt) for t, salt in ((PLAIN, None), (OTHER, "mine"), (PLAIN, None))]
PLAIN_ASKS.append(Ask(tuple(LAST)))
COMPOSED = Ask(prompt(ONE, TWO, query=QUERY), salt="mine")
PRIVATE_ASKS = [
    COMPOSED,
    COMPOSED,  # warm
    Ask(COMPOSED.tokens, extra={"kv_cache_report_mode": "full"}, salt="mine"),
    Ask(COMPOSED.tokens, sampling={"prompt_logprobs": 1}, salt="mine"),
    Ask(prompt(TWO, ONE, query=())),  # a warm-up prompt
    ranged(ONE, TWO, lead=(), query=QUERY),
]


@pytest.mark.fast("hybrid")
def test_only_blocks_of_plain_requests_are_published(model: Path, start_engine: EngineFactory) -> None:
    args = EVENTS | {"num_gpu_blocks_override": 60 if model.name == "hybrid" else 100}
    ours, stock = (start_engine(model, hypic=hypic, **args) for hypic in (True, False))
    plain, private, last = PLAIN_ASKS, PRIVATE_ASKS, list(PLAIN_ASKS[-1].tokens)
    asks = list(chain.from_iterable(zip(plain[:-1], private[::2], private[1::2], strict=True)))
    assert all_same(ours.ask_one_by_one(*asks, plain[-1])[::3], stock.ask_one_by_one(*plain))
    (events, leaked), (wanted, _) = (engine.call(published, last) for engine in (ours, stock))
    assert not leaked, f"published: {leaked}"
    assert events == wanted, "events of plain requests are those of a stock engine"
    assert {e["type"] for e in events} == {"BlockStored"} and events
    # Blocks are removed as others need them, those of streams without a word.
    tight = [Ask(tuple(tokens)) for tokens in random_segments([1500] * 8, vocab=480, seed=99)]
    ours.ask_one_by_one(*tight[:4], COMPOSED, *tight[4:], Ask(tuple(LAST[::-1])))
    events, leaked = ours.call(published, LAST[::-1])
    stored: set[Any] = set()
    for event in events:
        named = {(event["group_idx"], h) for h in event["block_hashes"]}
        stored |= named if event["type"] == "BlockStored" else set()
        assert named <= stored, "an event removes a block that no event has stored"
    assert not leaked and any(e["type"] == "BlockRemoved" for e in events)
    ours.reset()
    ours.ask_one_by_one(Ask(tuple(TWO * 3)), Ask(tuple(LAST[1:])))
    assert ours.call(published, LAST[1:])[0][-1]["token_ids"], "after a reset events go on"
