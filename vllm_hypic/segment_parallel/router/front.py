"""The front: takes clients' requests, spreads those that gain by it, relays everything."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from ...config.router import RouterConfig, Way
from ...primitives.options import REMOTE, REMOTE_DEADLINE
from .assign import Decision, Traffic, decide, missing
from .breakdown import HEADER, Breakdown
from .exchange import REQUEST_ID, ClientGone, Exchange, good_request_id
from .flights import Flight, Flights
from .instances import Instance, Pool
from .metrics import RouterMetrics
from .notices import Notices
from .plan import Planned, SegmentAsk, plan_request
from .prompt import PATHS, Whole, tokenize_request, whole_reason
from .segment_request import Origin
from .tokens import NoAnswer, tokens_of
from .upstream import Answer, Ask, UpstreamFailed, open_answer, request_headers

log = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""How long workers' answers are waited for after the combine node's."""
_TOKENIZERS = 2
"""Instances that are asked to tokenise a prompt before it goes whole to one."""
_MOST_TRIED = 3
"""Instances that one request is given to: one that kills its engine must not kill them all."""
_LEFT_S = 1.0
"""How long a combine node has to notice that a client left."""
_REMIND_S = 2.0
"""A record that should have come and is not there after so long is withdrawn, or told again."""


@dataclass(frozen=True)
class _Request:
    """A completion or chat request."""

    id: str
    ask: Ask
    path: str
    body: Mapping[str, Any]
    origin: Origin
    times: Breakdown


class Front:
    """ASGI application for everything but the router's own routes."""

    def __init__(
        self,
        pool: Pool,
        settings: RouterConfig,
        http: httpx.AsyncClient,
        flights: Flights,
        notices: Notices,
        metrics: RouterMetrics,
    ) -> None:
        self._pool, self._settings, self._http = pool, settings, http
        self._flights, self._notices, self._metrics = flights, notices, metrics
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        work = asyncio.create_task(self._serve(exchange))
        gone = asyncio.create_task(exchange.gone())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.disconnects.inc()
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                return
            work.result()
        except ClientGone:
            self._metrics.disconnects.inc()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def close(self) -> None:
        """End what still runs after answers."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _serve(self, exchange: Exchange) -> None:
        begun = time.monotonic()
        if exchange.method == "POST" and exchange.path in PATHS:
            body = await exchange.body()
            request = _request(exchange, body, begun)
            if request is not None:
                await self._complete(exchange, request)
                return
            # No JSON object: the instance says what is wrong with it.
            await self._proxy(exchange, body)
        else:
            await self._proxy(
                exchange, exchange.chunks() if exchange.has_body else await exchange.body() or None
            )

    # -- completions and chats -------------------------------------------------------------------

    async def _complete(self, exchange: Exchange, request: _Request) -> None:
        """Parallel if that gains, else whole; again on another instance while no byte is answered."""
        tried: list[Instance] = []
        reason, ids = await self._tokens(request)
        last: UpstreamFailed | None = None
        while (candidates := self._pool.combiners(without=tried)) and len(tried) < _MOST_TRIED:
            plans = _Plans(request, ids, self._flights.traffic(request.origin))
            instance, decision, reason = self._choose(plans, candidates, reason)
            try:
                if decision is None:
                    assert reason is not None
                    answer = await self._open_whole(request, instance, reason, plans)
                else:
                    answer = await self._open_parallel(request, decision, plans)
            except UpstreamFailed as e:
                self._failed("answer", instance, request.id, e)
                tried.append(instance)
                last = e
                continue
            await self._relay(exchange, request, answer)
            return
        await self._refuse(exchange, request.id, last)

    async def _tokens(self, request: _Request) -> tuple[Whole | None, Sequence[int] | None]:
        """The prompt's tokens, or why they are not needed."""
        described = [i for i in self._pool.combiners() if i.spreads and i.description is not None]
        if not described:
            return Whole.NO_WORKERS, None
        described.sort(key=lambda i: i.open_requests)
        instance = described[0]
        description = instance.description
        assert description is not None
        reason = whole_reason(
            request.path,
            request.body,
            description.models,
            instance.separator_text,
            description.primitives.sep,
        )
        if reason is not None:
            return reason, None
        prompt = request.body.get("prompt")
        if isinstance(prompt, list):
            return (None, prompt) if len(prompt) <= description.max_model_len else (Whole.NOT_PLANNED, None)
        asked = tokenize_request(request.path, request.body)
        for instance in described[:_TOKENIZERS]:
            try:
                ids = await tokens_of(self._http, instance, asked, request.origin)
            except NoAnswer as e:
                self._metrics.failures.labels("tokenize", instance.url).inc()
                log.warning("request %s: %s did not tokenise it: %s", request.id, instance.url, e)
                continue
            if ids is None:
                return Whole.NOT_TOKENISED, None
            if len(ids) > description.max_model_len:
                return Whole.NOT_PLANNED, None  # it will be refused
            return (None, ids) if description.primitives.sep in ids else (Whole.NO_SEGMENTS, None)
        return Whole.NOT_TOKENISED, None

    def _choose(
        self, plans: _Plans, candidates: Sequence[Instance], reason: Whole | None
    ) -> tuple[Instance, Decision | None, Whole | None]:
        """The combine node, and how to spread the request; ``None``: whole, for the reason given.

        Nothing is awaited between here and the first segment request: the next request sees this one's load.
        """
        if reason is Whole.SEGMENT_IDS:
            return candidates[0], None, reason  # ids of compiled segments are known where /v1/hypic goes
        tokens = [plans.tokens(i, plans.missing(i)) for i in candidates]
        instance = self._pool.cheapest(candidates, tokens)
        if reason is not None:
            return instance, None, reason
        planned = plans.at(instance)
        if planned is None:
            return instance, None, Whole.NOT_PLANNED
        if not planned.segments:
            return instance, None, Whole.NO_SEGMENTS
        spreading = self._pool.spreading()
        if not instance.spreads or not any(i is not instance for i in spreading):
            return instance, None, Whole.NO_WORKERS
        decision = decide(planned, instance, spreading, plans.traffic)
        if not decision.tasks or not self._settings.enough(decision.gain):
            decision = decision.only_joining()
            if not decision.joins:
                return instance, None, Whole.NO_GAIN
        return instance, decision, None

    async def _open_whole(
        self, request: _Request, instance: Instance, reason: Whole, plans: _Plans
    ) -> Answer:
        wanted = plans.missing(instance)
        for ask in wanted:
            instance.asked_for(ask.key)
        request.times.whole(reason.value)
        self._metrics.requests.labels("whole").inc()
        self._metrics.whole.labels(reason.value).inc()
        self._metrics.plan_s.observe(time.monotonic() - request.times.begun)
        return await self._open(request, instance, request.ask, plans.tokens(instance, wanted))

    async def _open_parallel(self, request: _Request, decision: Decision, plans: _Plans) -> Answer:
        """Send the segments out and the composed request at once; its first byte ends the flights."""
        combine = decision.combine
        planned = plans.at(combine)
        assert planned is not None
        flights = self._flights.begin(planned, decision, request.origin)
        request.times.parallel(decision, flights)
        self._metrics.requests.labels("parallel").inc()
        self._metrics.plan_s.observe(time.monotonic() - request.times.begun)
        remind = asyncio.create_task(self._remind(combine, flights))
        try:
            body = msgspec.json.encode(self._composed(request.body, combine, flights))
            tokens = planned.stream_tokens + sum(a.tokens for a in decision.local)
            answer = await self._open(request, combine, replace(request.ask, body=body), tokens)
        except asyncio.CancelledError:
            if unwanted := self._flights.release(flights):
                self._later(self._withdraw_unwanted(combine, unwanted, plans.traffic))
            raise
        except BaseException:
            self._flights.release(flights)
            raise
        finally:
            remind.cancel()
        self._later(self._settle(request.times, flights))
        return answer

    def _composed(
        self, body: Mapping[str, Any], combine: Instance, flights: Sequence[Flight]
    ) -> dict[str, Any]:
        """The client's request, with the names of the records to wait for."""
        options = {**(body.get("vllm_xargs") or {}), REMOTE: [f.name.key for f in flights]}
        own = combine.description.deadline_s if combine.description is not None else None
        limits = [s for s in (self._settings.deadline_s, own) if s is not None]
        if limits:
            options[REMOTE_DEADLINE] = min(limits)
        return {**body, "vllm_xargs": options}

    async def _open(self, request: _Request, instance: Instance, ask: Ask, tokens: int) -> Answer:
        """Until the first byte; the instance's load has ``tokens`` meanwhile."""
        instance.open_requests += 1
        instance.sent_tokens += tokens
        try:
            answer = await open_answer(self._http, instance, ask)
        except BaseException:
            instance.open_requests -= 1
            raise
        finally:
            instance.sent_tokens -= tokens
        request.times.first_byte_at = time.monotonic()
        instance.trust()
        return answer

    async def _relay(self, exchange: Exchange, request: _Request, answer: Answer) -> None:
        try:
            extra = [(REQUEST_ID, request.id.encode())]
            if exchange.header(HEADER) == "1":
                extra.append(await request.times.header(answer.instance))
            await exchange.relay(answer, extra)
        except UpstreamFailed as e:
            self._failed("stream", answer.instance, request.id, e)
            if not answer.is_event_stream:
                raise _BrokenOff(f"request {request.id}: {e}") from e
            await exchange.end_stream(f"the instance that answered failed: {e}")
        finally:
            answer.instance.open_requests -= 1
            await answer.close()

    async def _remind(self, combine: Instance, flights: Sequence[Flight]) -> None:
        """Withdraw what is over and did not arrive, or tell again which tier has it, again and again.

        A flight may have been given up, or found no longer wanted by a request that has left, before the
        combine node had read this one, which would wait for it until its deadline.
        """
        while True:
            await asyncio.sleep(_REMIND_S)
            now = time.monotonic()
            late = [
                f
                for f in flights
                if f.over_at is not None and f.over_at + _REMIND_S <= now and not combine.holds(f.name.key)
            ]
            if stored := [f.name.key for f in late if f.way is Way.TIERS]:
                await self._notices.stored(combine, stored)
            if lost := [f.name.key for f in late if f.way is not Way.TIERS]:
                await self._notices.withdraw(combine, lost)

    async def _withdraw_unwanted(
        self, combine: Instance, unwanted: Sequence[Flight], traffic: Traffic
    ) -> None:
        """Requests of other routers may wait at ``combine`` for what the last client here no longer wants.

        Not at once: by then the combine node has noticed that this client left, and computes nothing for it.
        """
        await asyncio.sleep(_LEFT_S)
        keys = [f.name.key for f in unwanted if not traffic.coming(f.name.key, combine)]
        if keys:
            await self._notices.withdraw(combine, keys)

    async def _settle(self, times: Breakdown, flights: Sequence[Flight]) -> None:
        """Wait for the workers' last answers, then let the flights go."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                for flight in flights:
                    await flight.over.wait()
        except TimeoutError:
            pass
        finally:
            self._flights.release(flights)
        times.observe(self._metrics)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- everything else -------------------------------------------------------------------------

    async def _proxy(self, exchange: Exchange, body: Any) -> None:
        """To an instance that answers clients, unchanged.

        The cache API goes always to the same one, since ids live where they were made.
        """
        self._metrics.requests.labels("proxied").inc()
        streamed = not (body is None or isinstance(body, bytes))
        headers = request_headers(exchange.headers, streamed=streamed)
        ask = Ask(exchange.method, exchange.target, headers, body)
        request_id = good_request_id(exchange.header(REQUEST_ID)) or uuid.uuid4().hex
        tried: list[Instance] = []
        last: UpstreamFailed | None = None
        while candidates := self._pool.combiners(without=tried):
            pinned = exchange.path.startswith("/v1/hypic/")
            instance = candidates[0] if pinned else self._pool.cheapest(candidates, [0] * len(candidates))
            instance.open_requests += 1
            try:
                answer = await open_answer(self._http, instance, ask)
                try:
                    await exchange.relay(answer, [])
                    return
                finally:
                    await answer.close()
            except UpstreamFailed as e:
                if exchange.begun:
                    self._failed("stream", instance, request_id, e)
                    raise _BrokenOff(f"{exchange.method} {exchange.path}: {e}") from e
                if e.answer is not None:  # its own affair: it says so itself
                    await exchange.relay(e.answer, [])
                    return
                self._failed("proxied", instance, request_id, e)
                last = e
                tried.append(instance)
                if not ask.replayable or ask.method not in ("GET", "HEAD", "OPTIONS"):
                    break
            finally:
                instance.open_requests -= 1
        await self._refuse(exchange, request_id, last)

    async def _refuse(self, exchange: Exchange, request_id: str, last: UpstreamFailed | None) -> None:
        """No instance answered: what the last one said, or the router's own words."""
        if last is not None and last.answer is not None:
            await exchange.relay(last.answer, [(REQUEST_ID, request_id.encode())])
        elif last is not None:
            message = f"no instance could answer; the last one: {last}"
            await exchange.refuse(502, message, "BadGatewayError", request_id)
        else:
            why = "; ".join(f"{i.url}: {i.reason or 'not usable'}" for i in self._pool.instances)
            message = f"no instance that answers clients is usable ({why})"
            await exchange.refuse(503, message, "ServiceUnavailableError", request_id)

    def _failed(self, what: str, instance: Instance, request_id: str, error: UpstreamFailed) -> None:
        self._metrics.failures.labels(what, instance.url).inc()
        log.warning("request %s: %s failed at %s: %s", request_id, what, instance.url, error)
        if error.answer is None:  # else it lives: the next request may be none of those that fail there
            instance.fail(str(error))


class _BrokenOff(Exception):
    """An answer ended too early and cannot say so: the connection is closed, so that the client notices."""


class _Plans:
    """Plans of one request: one for each kind of instance, since pools may differ in size."""

    def __init__(self, request: _Request, ids: Sequence[int] | None, traffic: Traffic) -> None:
        self._request, self._ids, self.traffic = request, ids, traffic
        self._found: dict[object, Planned | None] = {}

    def missing(self, instance: Instance) -> list[SegmentAsk]:
        """What it would have to compute records of; none where nothing is planned."""
        planned = self.at(instance)
        return [] if planned is None else missing(planned, instance, self.traffic)

    def tokens(self, instance: Instance, wanted: Sequence[SegmentAsk]) -> int:
        """That it would have to prefill; 0 where nothing is planned."""
        planned = self.at(instance)
        return 0 if planned is None else planned.stream_tokens + sum(a.tokens for a in wanted)

    def at(self, instance: Instance) -> Planned | None:
        """``None``: it cannot be planned, or need not."""
        description = instance.description
        if self._ids is None or description is None:
            return None
        kind = description.planning
        if kind not in self._found:
            body = self._request.body
            extra, salt = body.get("vllm_xargs") or {}, body.get("cache_salt")
            self._found[kind] = plan_request(self._ids, extra, salt, description)
        return self._found[kind]


def _request(exchange: Exchange, body: bytes, begun: float) -> _Request | None:
    """``None``: it is no JSON object."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    request_id = (
        good_request_id(exchange.header(REQUEST_ID))
        or good_request_id(parsed.get("request_id"))
        or uuid.uuid4().hex
    )
    model, priority = parsed.get("model"), parsed.get("priority")
    origin = Origin(
        request_id,
        model if isinstance(model, str) else None,
        tuple(
            (k.decode("latin-1"), v.decode("latin-1"))
            for k, v in exchange.headers
            if k.lower() == b"authorization"
        ),
        priority if type(priority) is int else 0,
    )
    ask = Ask("POST", exchange.target, request_headers(exchange.headers, request_id), body)
    return _Request(request_id, ask, exchange.path, parsed, origin, Breakdown(begun))
