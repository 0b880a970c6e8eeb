"""A client of the completion routes that times its answers, and reads a router's breakdown of a request.

answer = ask(server.url, "/v1/completions", {"prompt": "...", "max_tokens": 8})
print(answer.text, answer.first_token_s)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

TOP = 5
"""Number of logprobs that :func:`completion` asks for at each token."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer.  Times are seconds from sending the request."""

    text: str
    finish_reason: str | None
    first_token_s: float
    total_s: float
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        """Return the prompt's cached tokens; the server must run with ``--enable-prompt-tokens-details``."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Part(msgspec.Struct, frozen=True):
    """A segment of a request that a router spread over workers."""

    source: str
    """Origin of the record: ``dispatched``, ``joined`` or ``held``."""
    worker: str | None
    """URL of the worker that delivered the record."""
    tokens: int
    seconds: float | None
    """Seconds from the dispatch of the segment until the delivery of the record."""
    way: str | None = None
    """Way of the record: ``direct``, or ``tiers`` for a tier that both servers share."""


class Breakdown(msgspec.Struct, frozen=True):
    """A router's report of the times of a request, in seconds."""

    kind: str
    """Kind of routing: ``parallel`` or ``whole``."""
    combine: str
    """URL of the server that answered."""
    plan_s: float
    """Time to tokenise, plan and assign."""
    first_byte_s: float
    dispatch_s: float | None = None
    """Time from the first dispatched segment to the last delivered record."""
    exposed_transfer_s: float | None = None
    """Part of ``dispatch_s`` after all segments were computed, with records still under way."""
    combine_s: float | None = None
    """Time from the last delivered record to the answer's first byte."""
    local: int = 0
    """Count of segments left to the combine node."""
    segments: tuple[Part, ...] | None = ()
    reason: str | None = None
    """Reason why the request went whole to a single instance."""


@dataclass(frozen=True)
class Reply:
    """A streamed answer with its logprobs.  Times are seconds from sending the request."""

    tokens: tuple[str, ...]
    """Tokens in the form ``token_id:...``."""
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    """Logprobs of the most likely tokens at each token, as sent: equal if and only if their bits are."""
    first_token_s: float
    total_s: float
    breakdown: Breakdown | None
    """Report of the router; ``None`` from any other server."""

    def same_as(self, other: Reply) -> bool:
        """Whether tokens and logprobs are the same to the last bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


def ask(url: str, path: str, body: Mapping[str, Any], *, timeout_s: float = 300.0) -> Answer:
    """Send a completion or chat completion; raise ``httpx.HTTPError`` if it is refused or broken off.

    ``first_token_s`` of the answer is the arrival of the first text, or the end of an answer without text.
    """
    stream = _Stream(url + path, {**body, "stream_options": {"include_usage": True}}, {}, timeout_s)
    texts: list[str] = []
    first: float | None = None
    reason: str | None = None
    usage: dict[str, Any] = {}
    for event in stream.events():
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            reason = choice.get("finish_reason") or reason
            if text:
                first = stream.seconds() if first is None else first
                texts.append(text)
    total = stream.seconds()
    return Answer("".join(texts), reason, total if first is None else first, total, usage)


def completion(url: str, body: Mapping[str, Any], *, timeout_s: float = 300.0) -> Reply:
    """Send a greedy completion; raise ``httpx.HTTPError`` if it is refused or broken off."""
    body = {"temperature": 0, **body, "logprobs": TOP, "return_tokens_as_token_ids": True}
    stream = _Stream(f"{url}/v1/completions", body, {"x-hypic-breakdown": "1"}, timeout_s)
    tokens: list[str] = []
    logprobs: list[tuple[tuple[str, float], ...]] = []
    first: float | None = None
    for event in stream.events():
        for choice in event["choices"]:
            if found := choice.get("logprobs"):
                first = stream.seconds() if first is None else first
                tokens += found["tokens"]
                logprobs += [tuple(sorted(top.items())) for top in found["top_logprobs"]]
    total = stream.seconds()
    if first is None:
        raise httpx.RemoteProtocolError("the answer has no tokens")
    told = stream.headers.get("x-hypic-breakdown")
    breakdown = None if told is None else msgspec.json.decode(told, type=Breakdown)
    return Reply(tuple(tokens), tuple(logprobs), first, total, breakdown)


class _Stream:
    """A streamed request, whose clock starts at the first call of :meth:`events`."""

    def __init__(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self._url, self._body, self._sent_headers = url, {**body, "stream": True}, headers
        self._timeout_s = timeout_s
        self._begin = 0.0
        self.headers: Mapping[str, str] = {}
        """Headers of the answer, empty until the answer begins."""

    def seconds(self) -> float:
        """Return the seconds since the request was sent."""
        return time.perf_counter() - self._begin

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the answer's events up to ``[DONE]``; raise ``httpx.HTTPError`` without it, or for errors."""
        self._begin = time.perf_counter()
        with httpx.stream(
            "POST", self._url, json=self._body, headers=self._sent_headers, timeout=self._timeout_s
        ) as response:
            if response.is_error:
                response.read()
                raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
            self.headers = response.headers
            finished = False
            for line in response.iter_lines():
                finished = finished or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise httpx.RemoteProtocolError(f"the answer broke off: {event['error']}")
                    yield event
        if not finished:
            raise httpx.RemoteProtocolError("the answer broke off before [DONE]")


def separator_of(url: str) -> int:
    """Return the token id of an instance's separator."""
    answer = httpx.get(f"{url}/v1/hypic/describe", timeout=30).raise_for_status()
    return int(answer.json()["separator"])
