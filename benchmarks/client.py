"""An open-loop client for OpenAI-compatible completion servers.

Requests go out at their scheduled times, however slow the answers are, and times count from the schedule:
what a user waits for, queues included.  A closed loop would slow down with the server and hide its queue.

Needs nothing of the server but ``/v1/completions`` with ``stream`` and ``stream_options.include_usage``.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families


class ClientError(RuntimeError):
    """The server's answer cannot be used; the message says what was asked and what came."""


class End(Enum):
    """How a request ended."""

    DONE = "done"
    TIMEOUT = "timeout"
    """No complete answer within the request's time."""
    FAILED = "failed"
    """Refused, broken off or unreadable."""
    STOPPED = "stopped"
    """Given up by the client, because the measurement was decided."""


@dataclass(frozen=True)
class Load:
    """One request of a schedule: ``body`` goes to ``/v1/completions`` ``at`` seconds after the start."""

    at: float
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One request's life, in seconds from the start of the run.

    ``token_times`` has one entry for each event with output; a server may send several tokens in one.
    Counts are the server's own (``usage``); zero where it sent none.
    """

    scheduled: float
    sent: float
    ended: float
    end: End
    error: str = ""
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled arrival to the first output; ``None`` when there was none."""
        return self.token_times[0] - self.scheduled if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with output: inter-token latencies where a server sends token by token."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first, mean; ``None`` with fewer than two."""
        if len(self.token_times) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def late(self) -> float:
        """Seconds between the schedule and the sending: the client's own delay."""
        return self.sent - self.scheduled


@dataclass(frozen=True)
class Complete:
    """A whole answer with log-probabilities, to compare answers bit by bit."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...]
    prompt_tokens: int
    cached_tokens: int


class Client:
    """A client of one server, as an asynchronous context manager.

    ``url`` is the server's root or its ``/v1``.  ``timeout_s`` is for a whole request, from sending on.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No limits and no timeout of httpx's own: a request that waits for a connection would be late, and
        # the time of a request is limited as a whole.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Name of the first model that the server lists; :class:`ClientError` when it lists none."""
        answer = await self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as e:
            raise ClientError(f"{self.url}/v1/models lists no model: {answer}") from e

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens around it left out; vLLM's ``/tokenize``."""
        body = {"prompt": text, "add_special_tokens": False}
        return list((await self._json("POST", "/tokenize", body))["tokens"])

    async def metrics(self) -> dict[str, float] | None:
        """The samples of ``/metrics`` by name, summed over labels; ``None`` where there are none."""
        try:
            response = await self._http.get("/metrics", timeout=30)
        except httpx.HTTPError:
            return None
        if response.is_error:
            return None
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    async def idle(self, timeout_s: float = 60.0) -> None:
        """Wait until a vLLM server has no request left, at least a moment with others.

        :class:`ClientError` when it still has after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            await asyncio.sleep(0.3)  # what ends now is counted a moment later
            found = await self.metrics() or {}
            left = sum(found.get(f"vllm:num_requests_{state}", 0) for state in ("running", "waiting"))
            if not left:
                return
            if time.monotonic() > deadline:
                raise ClientError(f"{self.url}: {left:.0f} requests are left after {timeout_s:g} s")

    async def complete(self, body: Mapping[str, Any]) -> Complete:
        """The whole answer to ``body``, which must ask for ``logprobs``; :class:`ClientError` else."""
        answer = await self._json("POST", "/v1/completions", {**body, "stream": False})
        try:
            [choice] = answer["choices"]
            found = choice["logprobs"]
            tops = tuple(tuple(sorted(top.items())) for top in found["top_logprobs"])
            usage = answer["usage"]
            return Complete(
                tuple(found["tokens"]),
                tuple(found["token_logprobs"]),
                tops,
                int(usage["prompt_tokens"]),
                _cached(usage),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ClientError(f"{self.url}: no log-probabilities in the answer: {str(answer)[:300]}") from e

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError as e:
            raise ClientError(f"{self.url}{path}: no answer after {self.timeout_s:g} s") from e
        except httpx.HTTPError as e:
            raise ClientError(f"{self.url}{path}: {_told(e)}") from e
        if response.is_error:
            raise ClientError(f"{self.url}{path}: HTTP {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError as e:
            raise ClientError(f"{self.url}{path}: no JSON: {response.text[:300]}") from e

    async def stream(self, load: Load, start: float) -> Outcome:
        """Send one request now and read its answer.  ``start`` is the run's, on ``time.perf_counter``.

        Never raises for what the server does: the outcome tells.  Cancelled, it closes the connection, and
        the server may drop the request.
        """
        sent = time.perf_counter() - start
        times: list[float] = []
        usage: dict[str, Any] = {}
        end, error = End.DONE, ""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read(load.body, start, times, usage)
        except TimeoutError:
            end, error = End.TIMEOUT, f"no complete answer after {self.timeout_s:g} s"
        except (httpx.HTTPError, ClientError) as e:
            end, error = End.FAILED, _told(e)
        if end is End.DONE and not times:
            end, error = End.FAILED, "the answer has no output"
        return Outcome(
            scheduled=load.at,
            sent=sent,
            ended=time.perf_counter() - start,
            end=end,
            error=error,
            token_times=tuple(times),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=_cached(usage),
            output_tokens=int(usage.get("completion_tokens") or 0),
        )

    async def _read(
        self, body: Mapping[str, Any], start: float, times: list[float], usage: dict[str, Any]
    ) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events, finished = Events(), False
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise ClientError(f"HTTP {response.status_code}: {text[:300]}")
            async for data in response.aiter_bytes():
                now = time.perf_counter() - start
                for event in events.feed(data):
                    if event == "[DONE]":
                        finished = True
                        continue
                    value = _event(event)
                    # Output, not text: tokens may have none, and the usage event has no choice.
                    if value.get("choices"):
                        times.append(now)
                    usage.update(value.get("usage") or {})
        if not finished:
            raise ClientError("the answer broke off before [DONE]")


class Events:
    """Cuts a stream of bytes into the data of its server-sent events.

    Lines end with LF, CR or CRLF and nothing else, so that other line separators inside JSON stay there
    (``httpx.Response.aiter_lines`` cuts at those too).  Comments and fields other than ``data`` are skipped.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """The events that are complete with these bytes, wherever they were cut."""
        text = self._rest + self._decode.decode(data)
        # A CR at the end may be half of a CRLF: it waits.
        held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
        *lines, rest = text.split("\n")
        self._rest = rest + held
        for line in lines:
            if line:
                name, _, value = line.partition(":")
                if name == "data":
                    self._data.append(value.removeprefix(" "))
            elif self._data:
                event, self._data = "\n".join(self._data), []
                yield event


async def run_schedule(
    client: Client,
    schedule: Sequence[Load],
    *,
    progress: Callable[[Outcome], None] | None = None,
    decided: Callable[[Outcome], bool] | None = None,
) -> list[Outcome]:
    """Send every request at its time and wait for all answers; outcomes in the order of ``schedule``.

    ``progress`` sees each outcome as it comes.  When ``decided`` says so of one, the rest is given up:
    requests under way end as :attr:`End.STOPPED`, and those not sent yet have no outcome.
    """
    start = time.perf_counter()
    stop = asyncio.Event()
    tasks: list[asyncio.Task[Outcome]] = []

    async def one(load: Load) -> Outcome:
        sent = time.perf_counter() - start
        try:
            outcome = await client.stream(load, start)
        except asyncio.CancelledError:
            return Outcome(load.at, sent, time.perf_counter() - start, End.STOPPED)
        if progress is not None:
            progress(outcome)
        if decided is not None and decided(outcome):
            stop.set()
        return outcome

    try:
        for load in schedule:
            if await _set_within(stop, load.at - (time.perf_counter() - start)):
                break
            tasks.append(asyncio.create_task(one(load)))
        pending = set(tasks)
        while pending and not stop.is_set():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # those that are done do not mind
        done = await asyncio.gather(*tasks, return_exceptions=True)
    return [_outcome(result, load) for result, load in zip(done, schedule, strict=False)]


async def run_closed(
    client: Client,
    bodies: Sequence[Mapping[str, Any]],
    concurrency: int,
    *,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Send the requests in order, ``concurrency`` at a time, each as soon as another has ended."""
    start = time.perf_counter()
    waiting = iter(enumerate(bodies))
    outcomes: dict[int, Outcome] = {}

    async def worker() -> None:
        for i, body in waiting:
            outcomes[i] = await client.stream(Load(time.perf_counter() - start, body), start)
            if progress is not None:
                progress(outcomes[i])

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return [outcomes[i] for i in range(len(outcomes))]


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set, or becomes so within this time."""
    if seconds > 0 and not event.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _outcome(result: Outcome | BaseException, load: Load) -> Outcome:
    if isinstance(result, asyncio.CancelledError):  # before its first step
        return Outcome(load.at, load.at, load.at, End.STOPPED)
    if isinstance(result, BaseException):
        raise result
    return result


def _event(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ClientError(f"the server sent an event that is no JSON: {text[:200]}") from e
    if not isinstance(value, dict):
        raise ClientError(f"the server sent an event that is no object: {text[:200]}")
    if error := value.get("error"):
        raise ClientError(f"the server broke off: {error}")
    return value


def _cached(usage: Mapping[str, Any]) -> int:
    """Prompt tokens that were reused; vLLM tells with ``--enable-prompt-tokens-details``."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
