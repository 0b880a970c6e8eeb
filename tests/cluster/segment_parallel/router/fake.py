"""A stand-in for ``vllm serve``: no model, but the real plan, events, receiver and sender."""

import asyncio
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from lib.http_server import STOP_S, HttpServer

from benchmarks.lib.processes import reserve_port
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.options import LinkDefaults, link_of_request, tier_of
from vllm_hypic.primitives.pieces import parse_prompt
from vllm_hypic.primitives.plan import PoolLimits, PromptPlan, build_plan
from vllm_hypic.primitives.tokens import PrimitiveIds
from vllm_hypic.segment_parallel.description import Description
from vllm_hypic.segment_parallel.events import Publisher
from vllm_hypic.segment_parallel.permits import Permits, Subject
from vllm_hypic.segment_parallel.received import Outcome
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.segment_parallel.secret import Secret
from vllm_hypic.segment_parallel.sender import Sender
from vllm_hypic.store.protocol import Verdict, object_name

SEP, PDEP, PAD = 100_000, 100_001, 100_002
IDS = PrimitiveIds(SEP, PDEP, PAD)
LIMITS = PoolLimits(1000, 1000, 64, 8191, 1000, 1)
SEAM, LEAST = 2, 4
PERMITS = Permits(b"p" * 32)
"""What routers of tests sign with."""


def description(**fields: Any) -> Description:
    """What an instance says of itself; whatever is not told is as usual."""
    usual = {
        **{"instance": "i", "models": ("m",), "namespace": "n" * 64, "max_model_len": 8192, "limits": LIMITS},
        **{"receiver": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101"},
        **{"separator": SEP, "pdep": PDEP, "pad": PAD},
        **{"link": "hypic", "seam_tokens": SEAM, "min_segment_tokens": LEAST},
        "has_linear": True,
    }
    return Description(**usual | fields)


def word(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "big")


def tokens_of(text: str) -> list[int]:
    special = {"<|hypic_sep|>": SEP, "<|hypic_pdep|>": PDEP, "<|hypic_pad|>": PAD}
    return [special.get(w, word(w)) for w in text.split()]


LENGTHS = [60, 200, 90, 140, 70, 110, 100, 50]
_number = itertools.count()


def cold(lengths: Sequence[int] = LENGTHS, query: str = "what ?") -> str:
    """A prompt of segments that nobody has seen, ``lengths`` in tokens: a word is a token."""
    name = next(_number)
    segments = [" ".join(f"p{name}s{i}w{j}" for j in range(n)) for i, n in enumerate(lengths)]
    return " <|hypic_sep|> ".join([*segments, query])


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def extra(self) -> dict[str, Any]:
        return self.json.get("vllm_xargs") or {}


@dataclass
class Behaviour:
    """How it misbehaves; a test may change it at any time."""

    s_per_token: float = 0.0
    segment_status: int | None = None
    segments_hang: bool = False
    tier_status: int | None = None
    """Its shared tier takes nothing: what such a segment request is answered."""
    tier_hangs: bool = False
    die_after_storing: bool = False
    segments_lost: bool = False
    """Segment requests are answered as delivered, and are not."""
    answer_status: int | None = None
    error_event: bool = False
    hold: bool = False
    """No completion is answered while this is set."""
    chunk_s: float = 0.0
    die_after: int | None = None
    """Chunks after which the whole process dies."""
    tokenize_status: int | None = None
    tokenize_hangs: bool = False
    describe_status: int | None = None


@dataclass
class FakeInstance:
    """One instance with threads of its own; ``close()`` it."""

    namespace: str = "n" * 64
    limits: PoolLimits = LIMITS
    secret: Secret | None = None
    permits: Permits = PERMITS
    behaviour: Behaviour = field(default_factory=Behaviour)
    models: tuple[str, ...] = ("base",)
    deadline_s: float | None = None
    tiers: dict[str, set[str]] = field(default_factory=dict)
    """Shared tiers by identity, with the keys of what they hold: the same objects in all that share them."""

    def __post_init__(self) -> None:
        # Ports of HTTP and events, kept while the instance is dead.
        self._reserved = [reserve_port(), reserve_port()]
        self._port, events = (held.getsockname()[1] for held in self._reserved)
        self.events_url = f"tcp://127.0.0.1:{events}"
        self.seen: list[Seen] = []
        self.computed: list[str] = []
        """Keys, in order, whoever asked."""
        self.fetched: list[str] = []
        """Keys that were read from a shared tier, in order."""
        self.cancelled = 0
        self.load = 0
        self.withdrawn: list[str] = []
        self.resident: set[str] = set()
        self.instance = ""
        self._making: dict[str, asyncio.Future[None]] = {}
        self.start()

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process at the same addresses, which knows nothing."""
        self.instance = secrets.token_hex(8)
        self.resident, self._making = set(), {}
        self._received: dict[str, Outcome] = {}
        self.receiver = Receiver("tcp://127.0.0.1:0", self.namespace, self.secret, 1 << 20)
        self.sender = Sender(self.namespace, self.secret)
        self.publisher = Publisher(self.events_url, self.secret)
        self._sent: dict[int, bool] = {}
        self._http = HttpServer(self._app(), self._port, lifespan="off")
        self.url = self._http.url

    def kill(self) -> None:
        """End as by SIGKILL: all connections break off."""
        if self._http.alive:
            self._http.kill()
            self.publisher.close()
            self.receiver.close()
            self.sender.close()

    def close(self) -> None:
        self.kill()
        for held in self._reserved:
            held.close()

    # -- the engine ------------------------------------------------------------------------------

    def describe(self) -> Description:
        names = ("instance", "models", "namespace", "limits", "deadline_s")
        own = {name: getattr(self, name) for name in names}
        where = {"receiver": self.receiver.url, "events": self.events_url, "shared_tiers": tuple(self.tiers)}
        return description(**own, **where, max_model_len=self.limits.max_request_tokens + 1)

    def plan(self, body: dict[str, Any]) -> PromptPlan:
        """The plan that an engine would make."""
        method = link_of_request(body.get("vllm_xargs") or {}, LinkDefaults("hypic", SEAM))
        namespace = Namespace(self.namespace).scoped(salt=body.get("cache_salt"), lora=None)
        pieces = parse_prompt(ids_of(body), IDS)
        return build_plan(pieces, method, namespace, self.limits, min_segment_tokens=LEAST)

    def have(self, *keys: str) -> None:
        """Have these cached from now on."""
        self.resident.update(keys)
        self.publisher.change(keys, [], [], self.load)

    def loaded(self, tokens: int) -> None:
        self.load = tokens
        self.publisher.change([], [], [], tokens)

    async def _obtain(self, key: str, tokens: int, await_s: float | None = None) -> None:
        """Compute a record or, with ``await_s``, wait for it so long; one at a time, once whoever asks."""
        if key in self.resident:
            return
        if key not in self._making:
            work = self._compute(key, tokens) if await_s is None else self._expect(key, tokens, await_s)
            self._making[key] = asyncio.ensure_future(work)
        await asyncio.shield(self._making[key])

    async def _compute(self, key: str, tokens: int) -> None:
        self.publisher.change([], [key], [], self.load)
        while self.behaviour.segments_hang:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.behaviour.s_per_token * tokens)
        self.computed.append(key)
        self.have(key)
        self._making.pop(key, None)

    async def _push(self, key: str, destination: str, seconds: float) -> bool:
        ticket = self.sender.send(object_name(key), memoryview(key.encode() * 4), destination, seconds)
        while ticket not in self._sent:
            await asyncio.sleep(0.002)
            self._sent.update({s.ticket: s.delivered for s in self.sender.poll()})
        return self._sent.pop(ticket)

    async def _expect(self, key: str, tokens: int, seconds: float) -> None:
        """Compute the record after all when it does not come."""
        name = object_name(key)
        self.publisher.change([], [key], [], self.load)
        self.receiver.expect(name, 1 << 20, lambda data: Verdict.TAKEN)
        until = time.monotonic() + seconds
        while name not in self._received and time.monotonic() < until:
            await asyncio.sleep(0.002)
            self._received.update({found.name: found.outcome for found in self.receiver.poll()})
        outcome = self._received.pop(name, None)
        stored = outcome is Outcome.IN_TIER and any(key in held for held in self.tiers.values())
        if stored:
            self.fetched.append(key)
        if stored or outcome is Outcome.TAKEN:
            self.have(key)
            self.receiver.settle(name)
            self._making.pop(key, None)
            return
        self.withdrawn.append(key)
        del self._making[key]
        await self._obtain(key, tokens)
        self.receiver.settle(name)

    # -- HTTP ------------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
        async def any_route(path: str, request: Request) -> Response:
            body = await request.body()
            headers = {k.lower(): v for k, v in request.headers.items()}
            seen = Seen(request.method, "/" + path, request.url.query, headers, body, time.monotonic())
            self.seen.append(seen)
            return await self._answer(seen, request)

        return app

    async def _answer(self, seen: Seen, request: Request) -> Response:
        b = self.behaviour
        statuses = {"/v1/hypic/describe": b.describe_status, "/tokenize": b.tokenize_status}
        if (status := statuses.get(seen.path)) is not None:
            return error(status, "told to fail")
        if seen.path == "/v1/hypic/describe":
            return Response(msgspec.json.encode(self.describe()), media_type="application/json")
        if seen.path == "/tokenize":
            while b.tokenize_hangs:
                await asyncio.sleep(0.005)
            return JSONResponse({"tokens": ids_of(seen.json), "count": 0, "max_model_len": 0})
        if seen.path == "/detokenize":
            return JSONResponse({"prompt": "<|hypic_sep|>" if seen.json["tokens"] == [SEP] else ""})
        if seen.path not in ("/v1/completions", "/v1/chat/completions"):
            return Response(b"\x00proxied\xff" + seen.body, 207, {"x-own": "kept"}, "application/x-thing")
        watch = asyncio.ensure_future(_gone(request))
        work = asyncio.ensure_future(self._complete(seen))
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cancelled += 1
                work.cancel()
                return Response(status_code=499)
            return work.result()
        finally:
            watch.cancel()

    async def _complete(self, seen: Seen) -> Response:
        b = self.behaviour
        while b.hold:
            await asyncio.sleep(0.005)
        try:
            body = seen.json
            self.permits.check(seen.extra, Subject(ids_of(body), body.get("cache_salt")))
            plan = None if SEP not in ids_of(body) else self.plan(body)
        except Exception as e:
            return error(400, f"cannot be planned: {e}")
        destination = seen.extra.get("hypic_push_to")
        if destination is not None:
            return await self._segment(seen, plan, destination)
        if b.answer_status is not None:
            return error(b.answer_status, "told to fail")
        remote = seen.extra.get("hypic_remote", [])
        seconds = seen.extra.get("hypic_remote_deadline_s", 60.0)
        lengths = {s.key: s.stop for s in plan.segments} if plan is not None else {}
        await asyncio.gather(
            *(self._obtain(k, n, seconds if k in remote else None) for k, n in lengths.items())
        )
        if not body.get("stream"):
            return Response(ANSWER, 200, {"x-engine": "fake"}, "application/json")
        return StreamingResponse(self._stream(), 200, {"x-engine": "fake"}, "text/event-stream")

    async def _segment(self, seen: Seen, plan: PromptPlan | None, destination: str) -> Response:
        if self.behaviour.segment_status is not None:
            return error(self.behaviour.segment_status, "told to fail")
        if self.behaviour.segments_lost:
            return Response(b"{}", 200)
        if plan is None or not plan.warm_only or len(plan.segments) != 1:
            return error(400, "no warm-up prompt of one segment")
        [segment] = plan.segments
        await self._obtain(segment.key, segment.stop)
        if (tier := tier_of(destination)) is not None:
            while self.behaviour.tier_hangs:
                await asyncio.sleep(0.005)
            if self.behaviour.tier_status is not None:
                return error(self.behaviour.tier_status, "the tier takes nothing")
            self.tiers[tier].add(segment.key)
            if self.behaviour.die_after_storing:
                self.kill()
            return Response(b"{}", 200)
        delivered = await self._push(segment.key, destination, seen.extra.get("hypic_push_deadline_s", 30.0))
        return Response(b"{}", 200) if delivered else error(500, "not delivered")

    async def _stream(self) -> AsyncIterator[bytes]:
        if self.behaviour.error_event:
            yield b'data: {"error": {"message": "dead", "type": "InternalServerError", "code": 500}}\n\n'
            yield b"data: [DONE]\n\n"
            return
        for i, chunk in enumerate(STREAM):
            if i == self.behaviour.die_after:
                self._http.loop.call_soon(self.kill)
                await asyncio.sleep(STOP_S)
            yield chunk
            await asyncio.sleep(self.behaviour.chunk_s)

    # -- what came -------------------------------------------------------------------------------

    @property
    def segment_requests(self) -> list[Seen]:
        return [s for s in self.completions if "hypic_push_to" in s.extra]

    @property
    def composed(self) -> list[Seen]:
        return [s for s in self.completions if "hypic_push_to" not in s.extra]

    @property
    def completions(self) -> list[Seen]:
        return [s for s in list(self.seen) if s.path in ("/v1/completions", "/v1/chat/completions")]


def behave(fakes: Iterable[FakeInstance], **how: Any) -> None:
    for fake in fakes:
        for name, value in how.items():
            setattr(fake.behaviour, name, value)


ANSWER = b'{"choices": [{"text":  "an answer"}]}\n'
STREAM = [
    b'data: {"choices": [{"text": "\xc3\xa4',
    b' b"}]}\r\n\r\n',
    b": a comment\n\n",
    b'data: {"usage":  null}\n\ndata: [DO',
    b"NE]\n\n",
]
"""Split where it hurts: within a character, between lines."""


def ids_of(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if prompt is None and "messages" in body:
        prompt = " ".join([*(f"<{m['role']}> {m['content']}" for m in body["messages"]), "<assistant>"])
    if isinstance(prompt, str):
        return tokens_of(prompt)
    return [t for t in prompt or [] if isinstance(t, int)]


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "FakeError", "code": status}}, status)


async def _gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
