"""Traffic of a soak: prompts with the answers of a cold server, and clients that ask for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_hypic.eval.task import Prompt
from vllm_hypic.primitives.builder import build_prompt

from .lib.prompts import uneven, writer
from .soak_checks import CUT_OFF, Failure, Tokens, Verdict, judge

DOCUMENTS, COMPOSED, PLAIN, CONVERSATIONS, TURNS, SEGMENTS = 40, 50, 16, 6, 3, 12
ANSWER_TOKENS = 8
TENANTS = ("", "tenant-1", "tenant-2")
KINDS = {"plain": 20, "composed": 30, "streamed": 20, "aborted": 10, "multi-turn": 10, "cache API": 10}
"""Kinds of traffic, and how often each is drawn."""


@dataclass(frozen=True)
class Case:
    """A prompt, and its answer where nothing is cached."""

    name: str
    prompt: list[int] | str
    reference: Tokens


@dataclass(frozen=True)
class SegmentCase:
    """The same for a prompt that names its document by an id."""

    head: str
    document: str
    question: str
    case: Case


@dataclass(frozen=True)
class Cases:
    plain: Sequence[Case]
    composed: Sequence[Case]
    conversations: Sequence[Sequence[Case]]
    segments: Sequence[SegmentCase]


def body_of(prompt: list[int] | str, salt: str, **more: Any) -> dict[str, Any]:
    tokens = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0, "logprobs": 2}
    tenant = {"cache_salt": salt} if salt else {}
    return {"prompt": prompt, **tokens, **tenant, "return_tokens_as_token_ids": True, **more}


async def prepare(model: Path, separator: int, seed: int, control: str, http: httpx.AsyncClient) -> Cases:
    """Draw all prompts and have the server at ``control`` answer each, alone, under a salt of its own."""
    from transformers import AutoTokenizer

    draw, rng, salts = writer(model, seed), random.Random(seed), itertools.count()
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def case(name: str, prompt: list[int] | str) -> Case:
        return Case(name, prompt, await complete(http, control, body_of(prompt, f"control-{next(salts)}")))

    def text(tokens: Sequence[int]) -> str:
        return " ".join(tokenizer.convert_ids_to_tokens(list(tokens)))

    heads = [draw.document(n) for n in (48, 96)]
    documents = [draw.document(rng.randrange(72, 240)) for _ in range(DOCUMENTS)]
    zipf = [1 / rank for rank in range(1, DOCUMENTS + 1)]

    def composed() -> list[int]:
        drawn = dict.fromkeys(rng.choices(documents, zipf, k=8))  # each once, the popular ones likely
        chosen = rng.sample(list(drawn), k=min(len(drawn), rng.randrange(2, 6)))
        return Prompt(rng.choice(heads), tuple(chosen), draw.document(16)).marked(separator)

    async def conversation(number: int) -> list[Case]:
        prompt, turns = composed(), []
        for turn in range(TURNS):
            turns.append(await case(f"conversation {number}.{turn}", prompt))
            said = [int(token.removeprefix("token_id:")) for token in turns[-1].reference.ids]
            prompt = [*prompt, *said, *draw.document(12)]
        return turns

    async def segment(number: int) -> SegmentCase:
        head, document, question = map(text, (heads[0], documents[number], draw.document(16)))
        prompt = build_prompt(system=head, segments=[document], query=question)
        return SegmentCase(head, document, question, await case(f"segment {number}", prompt))

    return Cases(
        [await case(f"plain {i}", uneven(draw, (rng.randrange(8, 400),), 8).plain()) for i in range(PLAIN)],
        [await case(f"composed {i}", composed()) for i in range(COMPOSED)],
        [await conversation(i) for i in range(CONVERSATIONS)],
        [await segment(i) for i in range(SEGMENTS)],
    )


async def complete(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Tokens:
    """The answer of ``/v1/completions``, streamed if the body says so; raises ``httpx.HTTPError``."""
    choices: list[dict[str, Any]] = []
    if body.get("stream"):
        async with stream(http, url, body) as events:
            choices += [c async for event in events for c in event["choices"]]
    else:
        response = await http.post(f"{url}/v1/completions", json=body)
        choices += _checked(response).json()["choices"]
    # A stream that ends before its first token has no event that says why.
    if not choices or choices[-1]["finish_reason"] == "abort":
        raise httpx.RemoteProtocolError(CUT_OFF)
    found = [c["logprobs"] for c in choices if c.get("logprobs")]
    tops = [sorted(top.values(), reverse=True) for f in found for top in f["top_logprobs"]]
    return Tokens(
        tuple(t for f in found for t in f["tokens"]),
        tuple(p for f in found for p in f["token_logprobs"]),
        tuple(top[0] - top[1] for top in tops),
    )


@asynccontextmanager
async def stream(
    http: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events of a streamed answer; leaving early closes the connection."""

    async def events() -> AsyncIterator[dict[str, Any]]:
        finished = False
        async for line in response.aiter_lines():
            finished = finished or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise httpx.RemoteProtocolError(f"the answer broke off: {event['error']}")
                yield event
        if not finished:
            raise httpx.RemoteProtocolError("the answer broke off before [DONE]")

    async with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.is_error:
            await response.aread()
        _checked(response)
        yield events()


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise httpx.HTTPStatusError(response.text[:300], request=response.request, response=response)
    return response


@dataclass
class Traffic:
    """Clients that ask at random until :attr:`over` is set, and what came of it."""

    cases: Cases
    urls: Mapping[str, float]
    """Where requests go: URLs with their weights."""
    http: httpx.AsyncClient
    now: Callable[[], float]
    limit_s: float
    """A request that takes longer hangs."""
    seed: int
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answered: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    distance: float = 0.0
    """Largest of logprobs of the same token."""
    wrong: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """Ask on; ends within ``limit_s`` of :attr:`over`."""
        rng = random.Random(f"{self.seed} {number}")
        while not self.over.is_set():
            [kind] = rng.choices(list(KINDS), list(KINDS.values()))
            [url] = rng.choices(list(self.urls), list(self.urls.values()))
            begin = self.now()
            try:
                async with asyncio.timeout(self.limit_s * (TURNS if kind == "multi-turn" else 1)):
                    await self._ask(kind, url, rng)
                self.answered[kind] += 1
            except (httpx.HTTPError, TimeoutError) as e:
                status = e.response.status_code if isinstance(e, httpx.HTTPStatusError) else None
                message = "hangs" if isinstance(e, TimeoutError) else f"{type(e).__name__}: {e}"
                self.failures.append(Failure(kind, url, status, message, begin, self.now()))
                await asyncio.sleep(0.2)  # else a dead server would be asked a thousand times a second

    async def _ask(self, kind: str, url: str, rng: random.Random) -> None:
        # Now and then a tenant of whom nothing is cached.
        salt = rng.choice(TENANTS) if rng.random() < 0.85 else f"new-{rng.random()}"
        if kind == "plain":
            await self._compare(url, rng.choice(self.cases.plain), salt)
        elif kind == "multi-turn":
            for case in rng.choice(self.cases.conversations):
                await self._compare(url, case, salt)
        elif kind == "cache API":
            await self._manage(url, rng)
        elif kind == "aborted":
            await self._leave(url, rng.choice(self.cases.composed), salt, rng.uniform(0, 0.5))
        else:
            await self._compare(url, rng.choice(self.cases.composed), salt, stream=kind == "streamed")

    async def _compare(self, url: str, case: Case, salt: str, **more: Any) -> None:
        begin = self.now()
        prompt = more.pop("prompt", case.prompt)
        answer = await complete(self.http, url, body_of(prompt, salt, **more))
        verdict, distance = judge(answer, case.reference)
        self.verdicts[verdict] += 1
        self.distance = max(self.distance, distance)
        if verdict is Verdict.WRONG:
            self.wrong.append(
                f"{case.name} at {url}, salt {salt!r}, {begin:.1f} to {self.now():.1f} s: {answer.ids}, "
                f"expected {case.reference.ids}; logprobs differ by {distance:.2g}"
            )

    async def _leave(self, url: str, case: Case, salt: str, after_s: float) -> None:
        """Close the connection before the answer is complete."""
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                async with stream(self.http, url, body_of(case.prompt, salt, max_tokens=500)) as events:
                    async for _ in events:
                        pass

    async def _manage(self, url: str, rng: random.Random) -> None:
        """Compile a segment, perhaps pin it, ask by its id, then let go of it in one of three ways."""
        chosen, salt = rng.choice(self.cases.segments), rng.choice(TENANTS)
        headers = {"X-Cache-Salt": salt} if salt else {}

        async def call(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
            response = await self.http.request(method, f"{url}/v1/hypic{path}", json=body, headers=headers)
            return _checked(response).json()

        name = (await call("POST", "/segments", {"text": chosen.document}))["id"]
        if pinned := rng.random() < 0.5:
            await call("PATCH", f"/segments/{name}", {"pinned": True})
        prompt = f"{chosen.head}<|hypic_segment:{name}|>{chosen.question}"
        try:
            await self._compare(url, chosen.case, salt, prompt=prompt)
        finally:
            if pinned:
                await call("PATCH", f"/segments/{name}", {"pinned": False})
        match rng.randrange(3):
            case 0:
                await call("DELETE", f"/segments/{name}")
            case 1:
                await call("PATCH", f"/segments/{name}", {"ttl_s": 1.0})
            case _:
                await call("GET", "/stats")
