"""Requests whose answers are compared bit for bit, and where a router says that their time went."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ..harness.prompts import Prompt, Writer

TOP = 5
"""Logprobs of each token that are compared."""


class Part(msgspec.Struct, frozen=True):
    """One segment of a request that was spread."""

    source: str
    """``dispatched``, ``joined`` or ``held``."""
    worker: str | None
    """URL of the one that delivered it."""
    tokens: int
    seconds: float | None
    """From sending it out until it was delivered."""
    way: str | None = None
    """``direct``, or ``tiers``: through a tier that both share."""


class Breakdown(msgspec.Struct, frozen=True):
    """Where a router says that the time of one request went, in seconds."""

    kind: str
    """``parallel`` or ``whole``."""
    combine: str
    """URL of the one that answered."""
    plan_s: float
    """Tokenising, planning and assigning."""
    first_byte_s: float
    dispatch_s: float | None = None
    """First segment sent out to last record delivered."""
    exposed_transfer_s: float | None = None
    """Of that, when all segments were computed, and records still under way."""
    combine_s: float | None = None
    """Last record delivered to the answer's first byte."""
    local: int = 0
    """Segments that were left to the combine node."""
    segments: tuple[Part, ...] | None = ()
    reason: str | None = None
    """Why it went whole to one instance."""


@dataclass(frozen=True)
class Reply:
    """A streamed answer.  Times are seconds from sending the request."""

    tokens: tuple[str, ...]
    """As ``token_id:...``."""
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    """Of each token, the most likely ones', as they were sent: equal if and only if their bits are."""
    first_token_s: float
    total_s: float
    breakdown: Breakdown | None
    """``None`` from others than routers."""

    def same_as(self, other: Reply) -> bool:
        """Same tokens, and the same logprobs to the last bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


def completion(url: str, body: Mapping[str, Any], *, timeout_s: float = 300.0) -> Reply:
    """Send a completion; raises ``httpx.HTTPError`` when it is refused or broken off."""
    body = {
        "temperature": 0,
        **body,
        **{"stream": True, "logprobs": TOP, "return_tokens_as_token_ids": True},
    }
    tokens: list[str] = []
    logprobs: list[tuple[tuple[str, float], ...]] = []
    first: float | None = None
    finished = False
    begin = time.perf_counter()
    headers = {"x-hypic-breakdown": "1"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=timeout_s
    ) as response:
        if response.is_error:
            response.read()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        told = response.headers.get("x-hypic-breakdown")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                finished = finished or line == "data: [DONE]"
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.RemoteProtocolError(f"the answer broke off: {event['error']}")
            for choice in event["choices"]:
                if found := choice.get("logprobs"):
                    first = time.perf_counter() - begin if first is None else first
                    tokens += found["tokens"]
                    logprobs += [tuple(sorted(top.items())) for top in found["top_logprobs"]]
    if not finished or first is None:
        raise httpx.RemoteProtocolError(f"the answer ended after {len(tokens)} tokens")
    total = time.perf_counter() - begin
    breakdown = None if told is None else msgspec.json.decode(told, type=Breakdown)
    return Reply(tuple(tokens), tuple(logprobs), first, total, breakdown)


def separator_of(url: str) -> int:
    """The id of an instance's separator."""
    answer = httpx.get(f"{url}/v1/hypic/describe", timeout=30).raise_for_status()
    return int(answer.json()["separator"])


def writer(model: Path, seed: int) -> Writer:
    """Draws documents of the model's ordinary tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return Writer(sorted(set(tokenizer.get_vocab().values()) - special), seed)


def uneven(draw: Writer, lengths: tuple[int, ...], question: int) -> Prompt:
    """A fresh prompt with segments of these lengths, in tokens; the first is the leading one."""
    head, *documents = (draw.document(n) for n in lengths)
    return Prompt(head, tuple(documents), draw.document(question))
