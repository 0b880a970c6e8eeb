"""Pause, sleep and reset of a real server while composed requests are being answered, computed, or wait."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import pytest

from .conftest import DOCUMENTS, REUSED, Client, Question, cached, outcome, text

BOUND_S = 120.0
LONG = {"max_tokens": 250, "ignore_eos": True, "temperature": 0, "logprobs": 2}
"""An answer that is under way for a while."""
ANSWERS_S = 0.5
"""A server that is not paused would have given an answer by then."""
SEP = "<|hypic_sep|>"


class Live:
    """A streamed answer, read in a thread of its own."""

    def __init__(self, client: Client, prompt: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, args=(client.server.url, prompt), daemon=True)
        self._thread.start()

    def _read(self, url: str, prompt: str) -> None:
        body = {"prompt": prompt, "stream": True, **LONG}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:])["choices"][0])

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def begun(self) -> Self:
        """Once some tokens are here, and more are to come."""
        wait_for(lambda: len(self.events) > 3, "its first tokens")
        return self

    def ended(self) -> tuple[str, list[Any], str]:
        """Text, logprobs of each token, and why it ended."""
        self._thread.join(BOUND_S)
        assert self.over, "it hangs"
        logprobs = [top for e in self.events if e["logprobs"] for top in e["logprobs"]["top_logprobs"]]
        return "".join(e["text"] for e in self.events), logprobs, self.events[-1]["finish_reason"]


def wait_for(met: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + BOUND_S
    while not met():
        assert time.monotonic() < until, f"not within {BOUND_S} s: {what}"
        time.sleep(0.01)


def long(q: Question) -> str:
    """A prompt whose documents take a while to compute."""
    return SEP.join(["<bos>", *[f"{d} " * 20 for d in q.documents], q.question])


def seen_waiting(
    client: Client, asking: Callable[..., Future[dict[str, Any]]], question: Callable[[int], Question]
) -> Future[dict[str, Any]]:
    """A request that was seen waiting for records; where a look at the metrics is late, another is asked."""
    for seed in range(721, 741):
        waits = asking(long(question(seed)), **LONG)
        while not waits.done():
            if client.server.metrics()["vllm:hypic_waiting"]:
                return waits
    raise AssertionError("no request was seen waiting for records")


def order(client: Client, route: str, **query: Any) -> dict[str, Any]:
    return httpx.post(f"{client.server.url}{route}", params=query, timeout=BOUND_S).raise_for_status().json()


@dataclass(frozen=True)
class Pause:
    """A way to stop the engine, and the one to have it go on."""

    route: str
    query: Mapping[str, Any]
    go_on: str = "/resume"
    tags: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def of(self, client: Client) -> Iterator[None]:
        """Whatever happens in between, the server goes on: other tests share it."""
        order(client, self.route, **self.query)
        try:
            yield
        finally:
            order(client, self.go_on, **self.tags)


KEEP = Pause("/pause", {"mode": "keep", "clear_cache": False})
SLEEP = Pause("/sleep", {"level": 0, "mode": "keep"}, "/wake_up", {"tags": "scheduling"})
# vLLM empties the caches by default, whatever is kept.  On CPUs no memory is given back when it sleeps.
KEEP_AND_CLEAR = Pause("/pause", {"mode": "keep"})
SLEEP_AND_CLEAR = Pause("/sleep", {"level": 1, "mode": "keep"}, "/wake_up")
WAIT = Pause("/pause", {"mode": "wait"})
ABORT = Pause("/pause", {"mode": "abort"})


@pytest.fixture
def asking(client: Client) -> Iterator[Callable[..., Future[dict[str, Any]]]]:
    """Requests in threads."""
    with ThreadPoolExecutor() as threads:
        yield lambda prompt, **body: threads.submit(client.complete, prompt, **body)


@pytest.mark.fast("pause")
@pytest.mark.parametrize("pause", [KEEP, SLEEP], ids=["pause", "sleep"])
def test_what_is_kept_goes_on_as_if_nothing_had_been(client, question, pause):
    q = question(700)
    client.complete(q.prompt())
    alone = Live(client, q.prompt()).ended()
    assert held(client, q.prompt(), pause).ended() == alone and alone[2] == "length"
    assert cached(client.complete(q.prompt())) == REUSED, "records are kept, too"


@pytest.mark.slow
@pytest.mark.parametrize("pause", [KEEP_AND_CLEAR, SLEEP_AND_CLEAR], ids=["pause", "sleep"])
def test_what_is_kept_goes_on_without_the_caches(client, question, pause):
    q = question(706)
    client.complete(q.prompt())
    found, logprobs, reason = held(client, q.prompt(), pause).ended()
    assert found.strip().startswith(q.answer) and (len(logprobs), reason) == (LONG["max_tokens"], "length")
    assert outcome(client.complete(q.prompt())) == (q.answer, 0), "it read a record of before"


def held(client: Client, prompt: str, pause: Pause) -> Live:
    """An answer that paused and goes on; where it had ended before the pause came, another is asked for."""
    for _ in range(5):
        live = Live(client, prompt).begun()
        with pause.of(client):
            wait_for(lambda live=live: _rests(live), "no more tokens come")
            if not live.over:
                return live
    raise AssertionError("five answers ended before the pause came")


def _rests(live: Live) -> bool:
    before = len(live.events)
    time.sleep(ANSWERS_S)
    return len(live.events) == before


def test_what_comes_meanwhile_is_answered_afterwards(client, question, asking):
    cold, warm, warmed = question(701), question(702), question(703)
    client.complete(warm.prompt())
    with KEEP.of(client):
        found = [asking(cold.prompt()), asking(warm.prompt()), asking(SEP.join(["", *warmed.documents, ""]))]
        time.sleep(ANSWERS_S)
        assert not any(f.done() for f in found)
    answers = [f.result(BOUND_S) for f in found]
    assert [text(a) for a in answers] == [cold.answer, warm.answer, ""]
    assert [cached(a) for a in answers[:2]] == [0, REUSED]
    assert cached(client.complete(warmed.prompt())) == REUSED


def test_wait_lets_live_answers_end_and_empties_the_caches(client, question, asking):
    q, other = question(704), question(705)
    client.complete(q.prompt())
    alone = Live(client, q.prompt()).ended()
    live = Live(client, q.prompt()).begun()
    with WAIT.of(client):
        assert live.ended() == alone
        queued = asking(other.prompt())
        time.sleep(ANSWERS_S)
        assert not queued.done()
    assert text(queued.result(BOUND_S)) == other.answer
    assert outcome(client.complete(q.prompt())) == (q.answer, 0), "it read a record of before"
    assert cached(client.complete(q.prompt())) == REUSED


@pytest.mark.slow
def test_wait_with_requests_that_wait_for_records(client, question, asking):
    """Some of their segments are computed, some are not begun; nobody waits for ever."""
    cold = [question(710 + i) for i in range(3)]
    first = seen_waiting(client, asking, question)
    others = [asking(q.prompt()) for q in cold]
    with WAIT.of(client):
        pass
    assert first.result(BOUND_S)["usage"]["completion_tokens"]
    assert [text(f.result(BOUND_S)) for f in others] == [q.answer for q in cold]


@pytest.mark.fast("decode")
@pytest.mark.parametrize("phase", ["decode", "waiting for records"])
def test_abort_ends_what_lives(client, question, asking, phase):
    q = question(720)
    reasons = set()
    for _ in range(5):  # an answer may end before the abort comes
        if phase == "decode":
            live = Live(client, q.prompt()).begun()
        else:
            waits = seen_waiting(client, asking, question)
        with ABORT.of(client):
            if phase == "decode":
                reasons.add(live.ended()[2])
            else:
                reasons.add(waits.result(BOUND_S)["choices"][0]["finish_reason"])
        if "abort" in reasons:
            break
    assert "abort" in reasons
    assert outcome(client.complete(q.prompt())) == (q.answer, 0), "it read a record of before"


@pytest.mark.fast("running too")
@pytest.mark.parametrize("running", [True, False], ids=["running too", "not running"])
def test_reset_while_requests_live(client, question, asking, running):
    """vLLM tells a failure where requests run and are not to be reset; records are begun anew anyway."""
    q, cold = question(730), question(731)
    client.complete(q.prompt())
    live = Live(client, q.prompt()).begun()
    waits = asking(cold.prompt())
    told = order(client, "/reset_prefix_cache", reset_running_requests=running, reset_external=True)
    assert told == {"success": running}
    found, logprobs, reason = live.ended()
    assert found.strip().startswith(q.answer) and (len(logprobs), reason) == (LONG["max_tokens"], "length")
    assert text(waits.result(BOUND_S)) == cold.answer
    before = client.counts()
    assert outcome(client.complete(q.prompt())) == (q.answer, 0), "it read a record of before"
    client.idle()
    assert client.counts()["segments_computed"] - before["segments_computed"] == DOCUMENTS
    assert cached(client.complete(q.prompt())) == REUSED
