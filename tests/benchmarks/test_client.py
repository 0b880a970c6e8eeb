"""The client's own work, parsing and timing, against a small server on a real socket.

What servers of vLLM answer is tested in ``test_load.py``, with a real one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import Fake

from benchmarks.client import Client, ClientError, End, Events, Load, Outcome, run_closed, run_schedule
from vllm_hypic.harness.processes import free_port


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        yield server


async def one(fake: Fake, timeout_s: float = 5.0, **body: Any) -> Outcome:
    async with Client(fake.url, timeout_s=timeout_s) as client:
        [outcome] = await run_schedule(client, [Load(0.0, body)])
        return outcome


# -- events ------------------------------------------------------------------------------------------

STREAM = (
    ': a comment\r\ndata: {"a": "\u2028\u0085é"}\r\n\r\nevent: x\ndata:1\ndata: 2\n\nid: 7\n\n'
    "data\n\ndata:  two blanks\r\rdata: [DONE]\n\ndata: never finished\n"
).encode()
EXPECTED = ['{"a": "\u2028\u0085é"}', "1\n2", "", " two blanks", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_wherever_the_bytes_are_cut(size: int):
    events = Events()
    found = []
    for i in range(0, len(STREAM), size):
        found += events.feed(STREAM[i : i + size])
    assert found == EXPECTED


# -- one request -------------------------------------------------------------------------------------


async def test_outcome(fake: Fake):
    outcome = await one(fake, waits=[0.1, 0.05, 0.2])
    assert outcome.end is End.DONE and outcome.error == ""
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (9, 5, 3)
    assert 0.1 <= outcome.ttft < 5
    assert len(outcome.gaps) == 2 and sum(outcome.gaps) > 0.2
    assert outcome.tpot == pytest.approx(sum(outcome.gaps) / 2)
    assert outcome.ended >= outcome.token_times[-1]
    [(_, body, _)] = fake.arrived
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


async def test_answers_without_usage_count(fake: Fake):
    outcome = await one(fake, usage=False)
    assert outcome.end is End.DONE and outcome.prompt_tokens == outcome.cached_tokens == 0
    assert outcome.tpot is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"status": 400}, "HTTP 400.*not today"),
        ({"status": 500}, "HTTP 500"),
        ({"waits": []}, "no output"),
        ({"done": False}, "broke off before"),
        ({"raw": "data: {\n\n"}, "no JSON"),
        ({"raw": "data: [1]\n\n"}, "no object"),
        ({"raw": 'data: {"error": {"message": "engine died"}}\n\n'}, "engine died"),
    ],
)
async def test_failures_are_outcomes(fake: Fake, body, told):
    outcome = await one(fake, **body)
    assert outcome.end is End.FAILED
    assert re.search(told, outcome.error)


async def test_nobody_listens():
    async with Client(f"http://127.0.0.1:{free_port()}") as client:
        [outcome] = await run_schedule(client, [Load(0.0, {})])
    assert outcome.end is End.FAILED and outcome.error and outcome.ttft is None


async def test_timeout(fake: Fake):
    outcome = await one(fake, timeout_s=0.2, waits=[0.0, 5.0])
    assert outcome.end is End.TIMEOUT and "0.2 s" in outcome.error
    assert outcome.ttft is not None  # it had begun
    assert outcome.ended < 4


async def test_api_key(fake: Fake):
    async with Client(fake.url + "/v1/", api_key="secret") as client:
        await run_schedule(client, [Load(0.0, {})])
        assert await client.model() == "fake"
    assert fake.arrived[0][2] == "Bearer secret"


async def test_complete(fake: Fake):
    async with Client(fake.url) as client:
        answer = await client.complete({"logprobs": 2})
        assert answer.tokens == ("a",) and answer.logprobs == (-0.5,)
        assert answer.top_logprobs == ((("a", -0.5), ("b", -2.0)),)
        assert (answer.prompt_tokens, answer.cached_tokens) == (9, 5)
        with pytest.raises(ClientError, match=r"HTTP 400: .*not today"):
            await client.complete({"status": 400})


# -- schedules ---------------------------------------------------------------------------------------


async def test_arrivals_do_not_wait_for_answers(fake: Fake):
    # A loop that waits for an answer would send the second after two seconds. Machines may be busy.
    schedule = [Load(0.1 * i, {"waits": [2.0]}) for i in range(6)]
    async with Client(fake.url) as client:
        outcomes = await run_schedule(client, schedule)
    assert fake.most_working == 6
    arrived = [at - fake.arrived[0][0] for at, _, _ in fake.arrived]
    assert arrived == pytest.approx([load.at for load in schedule], abs=0.8)
    assert [o.scheduled for o in outcomes] == [load.at for load in schedule]
    assert all(0 <= o.late < 0.8 for o in outcomes)
    assert all(o.ttft >= 2.0 for o in outcomes)


async def test_ttft_counts_from_the_schedule():
    outcome = Outcome(scheduled=1.0, sent=1.5, ended=3.0, end=End.DONE, token_times=(2.0, 2.5))
    assert outcome.ttft == 1.0 and outcome.late == 0.5


async def test_decided_gives_up_the_rest(fake: Fake):
    schedule = [
        Load(0.0, {"waits": [30.0]}),
        Load(0.0, {"waits": [0.2]}),
        Load(0.1, {"waits": [30.0]}),
        Load(20.0, {}),
    ]
    begin = time.perf_counter()
    seen: list[Outcome] = []
    async with Client(fake.url) as client:
        outcomes = await run_schedule(
            client, schedule, progress=seen.append, decided=lambda o: o.end is End.DONE
        )
    assert time.perf_counter() - begin < 5
    assert [o.end for o in outcomes] == [End.STOPPED, End.DONE, End.STOPPED]
    assert seen == [outcomes[1]]
    while fake.working:  # the server learns that nobody listens
        assert time.perf_counter() - begin < 10
        await asyncio.sleep(0.05)
    assert fake.broken_off == 2


async def test_closed_loop(fake: Fake):
    bodies = [{"waits": [0.05], "number": i} for i in range(7)]
    async with Client(fake.url) as client:
        outcomes = await run_closed(client, bodies, 3)
    assert len(outcomes) == 7 and all(o.end is End.DONE for o in outcomes)
    assert fake.most_working == 3
    assert sorted(body["number"] for _, body, _ in fake.arrived) == list(range(7))


async def test_interrupts_are_passed_on(fake: Fake):
    async with Client(fake.url) as client:
        for run in (
            run_schedule(client, [Load(0.0, {"waits": [30.0]}), Load(10.0, {})]),
            run_closed(client, [{"waits": [30.0]}] * 4, 2),
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run, 0.3)
    assert len(fake.arrived) == 3
