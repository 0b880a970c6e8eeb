"""Completions and chats: distributed over workers where that gains, else passed whole to one instance."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec

from ...config.router import RouterConfig
from ...primitives.options import PERMIT, REMOTE, REMOTE_DEADLINE
from ..permits import Permits, Subject
from .assign import Decision, Traffic, decide, missing
from .breakdown import HEADER, RequestBreakdown
from .exchange import REQUEST_ID, BrokenOff, Exchange, good_request_id
from .instances import Instance, InstancePool
from .metrics import RouterMetrics
from .notifier import ReceiverNotifier
from .plan import Planned, SegmentAsk, plan_request
from .prompt import NoAnswer, Whole, is_ids, tokenize_request, tokens_of, whole_reason, without_transfer
from .segment_request import Origin
from .transfers import InFlightTransfer, InFlightTransfers
from .upstream import (
    UpstreamAnswer,
    UpstreamFailed,
    UpstreamRequest,
    count_failure,
    open_answer,
    request_headers,
    while_alive,
)

log = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""Seconds that the router waits for workers' answers after the combine node's answer."""
_TOKENIZERS = 2
"""Number of instances that may fail to tokenise a prompt before the prompt goes whole to an instance."""
_MOST_TRIED = 3
"""Limit on instances that one request is sent to, so that a request that crashes engines cannot crash all."""


@dataclass(frozen=True)
class Request:
    """A completion or chat request."""

    id: str
    ask: UpstreamRequest
    path: str
    body: Mapping[str, Any]
    origin: Origin
    times: RequestBreakdown


class Completions:
    """Answer completion and chat requests."""

    def __init__(
        self,
        pool: InstancePool,
        settings: RouterConfig,
        http: httpx.AsyncClient,
        transfers: InFlightTransfers,
        notifier: ReceiverNotifier,
        metrics: RouterMetrics,
        permits: Permits,
    ) -> None:
        self._pool, self._settings, self._http, self._permits = pool, settings, http, permits
        self._transfers, self._notifier, self._metrics = transfers, notifier, metrics
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel the background work that still follows answers."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def answer(self, exchange: Exchange, request: Request) -> None:
        """Answer a request: in parallel if that gains, else whole on one instance.

        Until the first byte of an answer, a failure sends the request to another instance."""
        tried: list[Instance] = []
        reason, ids = await self._tokens(request)
        last: UpstreamFailed | None = None
        while (candidates := self._pool.combiners(without=tried)) and len(tried) < _MOST_TRIED:
            plans = _Plans(request, ids, self._transfers.traffic(request.origin))
            instance, decision, reason = self._choose(plans, candidates, reason)
            try:
                if decision is None:
                    assert reason is not None
                    answer = await self._open_whole(request, instance, reason, plans)
                else:
                    answer = await self._open_parallel(request, decision, plans)
            except UpstreamFailed as e:
                count_failure(self._metrics, "answer", instance, request.id, e)
                tried.append(instance)
                last = e
                continue
            await self._relay(exchange, request, answer)
            return
        await exchange.no_answer(self._pool.instances, request.id, last)

    async def _tokens(self, request: Request) -> tuple[Whole | None, Sequence[int] | None]:
        """Return ``None`` and the prompt's token ids, or the reason to send it whole and ``None``."""
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
            literal=description.literal_text,
        )
        if reason is not None:
            return reason, None
        prompt = request.body.get("prompt")
        if is_ids(prompt):
            return (None, prompt) if len(prompt) <= description.max_model_len else (Whole.NOT_PLANNED, None)
        asked = tokenize_request(request.path, request.body)
        for instance in described[:_TOKENIZERS]:
            try:
                ids = await while_alive(instance, tokens_of(self._http, instance, asked, request.origin))
            except (NoAnswer, UpstreamFailed) as e:
                if isinstance(e, UpstreamFailed):
                    instance.fail(str(e))
                self._metrics.failures.labels("tokenize", instance.url).inc()
                log.warning("request %s: %s did not tokenise the prompt: %s", request.id, instance.url, e)
                continue
            if ids is None:
                return Whole.NOT_TOKENISED, None
            if len(ids) > description.max_model_len:
                return Whole.NOT_PLANNED, None  # the engine will refuse the prompt
            return (None, ids) if description.primitives.sep in ids else (Whole.NO_SEGMENTS, None)
        return Whole.NOT_TOKENISED, None

    def _choose(
        self, plans: _Plans, candidates: Sequence[Instance], reason: Whole | None
    ) -> tuple[Instance, Decision | None, Whole | None]:
        """Return the combine node and the request's decision; ``None``, and the reason, for a whole request.

        No code awaits between this choice and the first segment request, so that the next request's choice
        sees this request's load.
        """
        if reason is Whole.SEGMENT_IDS:
            return candidates[0], None, reason  # this instance gets /v1/hypic requests: it knows the ids
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
        self, request: Request, instance: Instance, reason: Whole, plans: _Plans
    ) -> UpstreamAnswer:
        wanted = plans.missing(instance)
        for ask in wanted:
            instance.asked_for(ask.key)
        request.times.whole(reason.value)
        self._metrics.requests.labels("whole").inc()
        self._metrics.whole.labels(reason.value).inc()
        self._metrics.plan_s.observe(time.monotonic() - request.times.begun)
        return await self._open(request, instance, request.ask, plans.tokens(instance, wanted))

    async def _open_parallel(self, request: Request, decision: Decision, plans: _Plans) -> UpstreamAnswer:
        """Send segment requests and the composed request at once; return the answer at its first byte."""
        combine = decision.combine
        planned = plans.at(combine)
        assert planned is not None
        transfers = self._transfers.begin(planned, decision, request.origin)
        request.times.parallel(decision, transfers)
        self._metrics.requests.labels("parallel").inc()
        self._metrics.plan_s.observe(time.monotonic() - request.times.begun)
        remind = asyncio.create_task(self._notifier.remind(combine, transfers))
        try:
            body = msgspec.json.encode(self._composed(request.body, combine, transfers))
            tokens = planned.stream_tokens + sum(a.tokens for a in decision.local)
            answer = await self._open(request, combine, replace(request.ask, body=body), tokens)
        except BaseException:
            if unwanted := self._transfers.release(transfers):
                self._later(self._notifier.withdraw_unwanted(combine, unwanted, self._transfers.brings))
            raise
        finally:
            remind.cancel()
        self._later(self._settle(request.times, transfers))
        return answer

    def _composed(
        self, body: Mapping[str, Any], combine: Instance, transfers: Sequence[InFlightTransfer]
    ) -> dict[str, Any]:
        """Return the client's request with the keys of the records to wait for, a deadline and a permit."""
        options = {**(body.get("vllm_xargs") or {}), REMOTE: [t.key for t in transfers]}
        own = combine.description.deadline_s if combine.description is not None else None
        limits = [s for s in (self._settings.deadline_s, own) if s is not None]
        if limits:
            options[REMOTE_DEADLINE] = min(limits)
        options[PERMIT] = self._permits.issue(options, Subject((), body.get("cache_salt")))
        return {**body, "vllm_xargs": options}

    async def _open(
        self, request: Request, instance: Instance, ask: UpstreamRequest, tokens: int
    ) -> UpstreamAnswer:
        """Return the answer at its first byte; until then the instance's load includes ``tokens``."""
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

    async def _relay(self, exchange: Exchange, request: Request, answer: UpstreamAnswer) -> None:
        try:
            extra = [(REQUEST_ID, request.id.encode())]
            if exchange.header(HEADER) == "1":
                extra.append(await request.times.header(answer.instance))
            await exchange.relay(answer, extra)
        except UpstreamFailed as e:
            count_failure(self._metrics, "stream", answer.instance, request.id, e)
            if not answer.is_event_stream:
                raise BrokenOff(f"request {request.id}: {e}") from e
            await exchange.end_stream(f"the instance failed during its answer: {e}")
        finally:
            answer.instance.open_requests -= 1
            await answer.close()

    async def _settle(self, times: RequestBreakdown, transfers: Sequence[InFlightTransfer]) -> None:
        """Wait up to ``_SETTLE_S`` for workers' last answers, release the transfers, then observe times."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                for transfer in transfers:
                    await transfer.over.wait()
        except TimeoutError:
            pass
        finally:
            self._transfers.release(transfers)
        times.observe(self._metrics)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Plans:
    """Plans of one request, one for each kind of instance: pools may differ in size."""

    def __init__(self, request: Request, ids: Sequence[int] | None, traffic: Traffic) -> None:
        self._request, self._ids, self.traffic = request, ids, traffic
        self._found: dict[object, Planned | None] = {}

    def missing(self, instance: Instance) -> list[SegmentAsk]:
        """Return the segments that ``instance`` would have to compute; empty without a plan."""
        planned = self.at(instance)
        return [] if planned is None else missing(planned, instance, self.traffic)

    def tokens(self, instance: Instance, wanted: Sequence[SegmentAsk]) -> int:
        """Return the number of tokens that ``instance`` would have to prefill; 0 without a plan."""
        planned = self.at(instance)
        return 0 if planned is None else planned.stream_tokens + sum(a.tokens for a in wanted)

    def at(self, instance: Instance) -> Planned | None:
        """Return the plan that ``instance`` would make; ``None`` if planning is impossible or needless."""
        description = instance.description
        if self._ids is None or description is None:
            return None
        kind = description.planning
        if kind not in self._found:
            body = self._request.body
            extra, salt = body.get("vllm_xargs") or {}, body.get("cache_salt")
            self._found[kind] = plan_request(self._ids, extra, salt, description)
        return self._found[kind]


def parse_request(exchange: Exchange, body: bytes, begun: float) -> Request | None:
    """Return the client's request without transfer options, which only routers may set; ``None`` when the
    body is no JSON object."""
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
    if (stripped := without_transfer(parsed)) is not parsed:
        log.warning("request %s: removed the client's transfer options: only routers set them", request_id)
        parsed, body = stripped, msgspec.json.encode(stripped)
    model, priority = parsed.get("model"), parsed.get("priority")
    origin = Origin(
        request_id,
        model if isinstance(model, str) else None,
        tuple((k, v) for k, v in exchange.headers if k.lower() == b"authorization"),
        priority if type(priority) is int else 0,
    )
    ask = UpstreamRequest("POST", exchange.target, request_headers(exchange.headers, request_id), body)
    return Request(request_id, ask, exchange.path, parsed, origin, RequestBreakdown(begun))
