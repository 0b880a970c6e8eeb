"""Measuring servers under a trace: points at given rates, and the search for sustainable ones."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.fidelity import GateFailed
from vllm_hypic.primitives.tokens import PrimitiveTexts

from .bench_serve import Bench, End, Outcome, TimedRequest
from .client import Client, ClientError, Complete, working
from .lib import report
from .lib.report import seconds
from .lib.stats import misses_allowed
from .search import RateSearch
from .servers import STOCK, Spec
from .trace import Trace, TraceRequest

OURS = PrimitiveTexts().sep
"""The plugin's separator."""
FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
"""How many requests have had their first token, by a vLLM server's metrics."""
PUBLISHED_S = 1.0
"""Longest time until a server's metrics show what it has sent."""
LATE = 0.05
"""Share of the limit by which the client itself may delay a request before it is told."""


@dataclass(frozen=True)
class LoadSettings:
    """How the trace is sent.  Times in seconds, rates in requests per second."""

    requests: int = 60
    """Counted requests of each measurement."""
    warm_up: int = 60
    warm_up_at_once: int = 4
    rates: tuple[float, ...] = ()
    """Measure these; empty: search."""
    limit_s: float = 10.0
    percentile: int = 99
    precision: float = 1.1
    probes: int = 9
    start_rate: float | None = None
    """Where the search starts; ``None``: half of what the warm-up reached."""
    finish: bool = False
    """Measure to the end even what has missed the limit already."""
    gate_requests: int = 2
    timeout_s: float = 600.0

    @property
    def needed(self) -> int:
        """Requests of a trace that never starts again."""
        return self.warm_up + self.requests * (len(self.rates) or self.probes)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of one quantity, seconds; each is a measured value."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @staticmethod
    def of(values: list[float]) -> Percentiles | None:
        if not values:
            return None
        p50, p90, p99 = (percentile(values, p) for p in (50, 90, 99))
        return Percentiles(p50, p90, p99, statistics.mean(values), max(values))


@dataclass(frozen=True)
class RatePoint:
    """One measurement: a window of the trace at one rate.

    Times and throughputs are there only where every request was answered.
    """

    server: str
    rate: float
    first_request: int
    requests: int
    replayed: bool
    """The trace was too short and started again: prefix caches may have seen these prompts."""
    ends: dict[str, int]
    errors: list[str]
    within: bool
    """All answered, and the percentile of the time to first token within the limit."""
    complete: bool
    late_s: float
    """The client's own largest delay."""
    seconds: float
    ttft_s: Percentiles | None = None
    gap_s: Percentiles | None = None
    """Between tokens (events with output)."""
    tpot_s: Percentiles | None = None
    """Per output token after the first, a mean for each request."""
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    """First-token times of all requests, in order of arrival."""

    @property
    def failed(self) -> int:
        return self.ends.get(End.FAILED.value, 0)


@dataclass(frozen=True)
class Sustained:
    """Result of a search: ``rate`` was sustained, ``failed_rate`` not; ``None`` where there was none."""

    server: str
    rate: float | None
    failed_rate: float | None
    probes: int


@dataclass(frozen=True)
class Ratio:
    """Sustainable rate of ``server`` over that of ``baseline``; ``low`` and ``high`` from the brackets."""

    server: str
    baseline: str
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class LoadResult:
    points: list[RatePoint]
    sustained: list[Sustained]
    ratios: list[Ratio]
    warm_up: dict[str, float]
    """Requests per second of the warm-up's second half, by server."""
    metrics: dict[str, dict[str, float]]
    """What servers with this plugin say of themselves at the end."""
    gate: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A :class:`Spec` that answers: its model's name and the separator as its trace needs it."""

    spec: Spec
    client: Client
    model: str
    separator: int | str | None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def bench(self) -> Bench:
        return Bench(self.client.url, self.model, self.client.api_key, self.client.timeout_s)

    def timed(self, trace: Trace, request: TraceRequest, at: float = 0.0) -> TimedRequest:
        return TimedRequest(at, trace.prompt(request, self.separator), request.output_tokens)

    def body(self, trace: Trace, request: TraceRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": trace.prompt(request, self.separator),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def connect(spec: Spec, client: Client, trace: Trace) -> Target:
    """Ask the server for its model and its separator's id; raises :class:`GateFailed`."""
    separator: int | str | None = spec.separator
    if separator is not None and trace.form == "tokens":
        ids = client.tokenize(str(separator))
        if len(ids) != 1:
            raise GateFailed(f"{spec.name}: separator {separator!r} gives {ids}: expected one token")
        [separator] = ids
    return Target(spec, client, client.model(), separator)


class Measurement:
    """All measurements of one run over servers that take turns."""

    def __init__(
        self, targets: Sequence[Target], trace: Trace, settings: LoadSettings, console: Console
    ) -> None:
        self.targets, self.trace, self.settings, self.console = list(targets), trace, settings, console
        self.points: list[RatePoint] = []

    def run(self) -> LoadResult:
        """Raises :class:`GateFailed` when a server's answers are wrong before anything is measured."""
        passed = self.check()
        reached = {target.name: self.warm_up(target) for target in self.targets}
        sustained = [] if self.settings.rates else self.search(reached)
        for i, rate in enumerate(self.settings.rates):
            for target in self._turn(i):
                self.measure(target, rate, i)
        metrics = {}
        for target in self.targets:
            found = target.client.metrics() or {}
            if own := {k: v for k, v in found.items() if "hypic" in k and not k.endswith("_created")}:
                metrics[target.name] = own
        return LoadResult(self.points, sustained, ratios(sustained), reached, metrics, passed)

    def _turn(self, i: int) -> list[Target]:
        """The targets, the last first every other time: what drifts hits all alike."""
        return self.targets if i % 2 == 0 else self.targets[::-1]

    def check(self) -> dict[str, Any]:
        """The gate: every server answers, all are asked the same, and a server that takes our separator gives
        the same answer bit for bit when its documents were just computed and when they are reused.

        Other servers with separators make no such promise: they are not asked for it.
        """
        count = min(self.settings.gate_requests, len(self.trace.requests))
        requests = self.trace.requests[:count]
        sizes: dict[str, list[int]] = {}
        reused: dict[str, list[int]] = {}
        with report.progress(self.console, len(self.targets) * count, "correctness") as steps:
            for target in self.targets:
                steps.show(f"correctness: {target.name}")
                for request in requests:
                    body = target.body(self.trace, request)
                    if target.spec.separator != OURS:
                        tokens = _answered(target, body)
                    else:
                        cold, warm = _twice(target, body)
                        tokens = warm.prompt_tokens
                        _require_same(target.name, cold, warm)
                        if not warm.cached_tokens:
                            raise GateFailed(
                                f"{target.name}: a repeated prompt reuses nothing: expected documents of "
                                "min_segment_tokens or more, a pool large enough (--cache-gib, --pool-share) "
                                "and a server with --enable-prompt-tokens-details"
                            )
                        reused.setdefault(target.name, []).append(warm.cached_tokens)
                    cuts = 0 if target.separator is None else len(request.documents) + 1
                    sizes.setdefault(target.name, []).append(tokens - cuts)
                    steps.done()
                target.client.idle()
        # In traces of texts, texts that meet without a separator may be tokenised together.
        if self.trace.form == "tokens" and len({tuple(s) for s in sizes.values()}) > 1:
            raise GateFailed(f"servers count different prompt tokens, without separators: {sizes}")
        return {
            "requests": count,
            "cold_equals_warm": sorted(reused),
            "prompt_tokens": sizes,
            "reused": reused,
        }

    def warm_up(self, target: Target) -> float:
        """Send the first requests, a few at a time, and count none.

        Returns how many a second of their second half were answered.
        """
        count = self.settings.warm_up
        if not count:
            return 0.0
        requests = [self.trace.requests[i % len(self.trace.requests)] for i in range(count)]
        with self.console.status(f"{target.name}: {count} requests to warm up"):
            outcomes = target.bench.run(
                [target.timed(self.trace, r) for r in requests], at_once=self.settings.warm_up_at_once
            )
        if bad := [o for o in outcomes if o.end is not End.DONE]:
            raise GateFailed(f"{target.name}: {len(bad)} of {count} requests failed: {bad[0].error}")
        ends = sorted(o.ended for o in outcomes)
        half = count // 2
        return half / (ends[-1] - ends[-1 - half]) if half and ends[-1] > ends[-1 - half] else 0.0

    def measure(self, target: Target, rate: float, number: int) -> RatePoint:
        """One point over the trace's window ``number``; it is also kept and told."""
        s = self.settings
        first = s.warm_up + number * s.requests
        window = self.trace.window(first, s.requests, rate)
        schedule = [target.timed(self.trace, request, at) for at, request in window]
        before = target.client.metrics() or {}
        overdue = Overdue(target.client, before, schedule, s)
        searching = not s.rates and not s.finish
        with self.console.status(f"{target.name}: {s.requests} requests, {rate:.3g} a second"):
            outcomes = target.bench.run(schedule, decided=overdue if searching else lambda: False)
        target.client.idle()
        replayed = first + s.requests > len(self.trace.requests)
        cached = _cached(target.client.metrics() or {}) - _cached(before)
        point = make_point(target.name, rate, first, outcomes, s, cached=cached, replayed=replayed)
        self.points.append(point)
        self.console.print(_line(point, s), style=None if point.complete else "dim")
        return point

    def search(self, reached: dict[str, float]) -> list[Sustained]:
        """The sustainable rate of every server.

        They take turns, each at its own rates; their probes of one number send the same window.
        """
        s = self.settings
        searches = {
            target.name: RateSearch(
                s.start_rate or reached[target.name] / 2 or 1 / s.limit_s, s.precision, s.probes
            )
            for target in self.targets
        }
        for i in range(s.probes):
            for target in self._turn(i):
                search = searches[target.name]
                if (rate := search.next_rate()) is not None:
                    search.record(rate, self.measure(target, rate, i).within)
        return [Sustained(name, x.sustained, x.failed, len(x.tried)) for name, x in searches.items()]


class Overdue:
    """Tells while requests are under way that more of them than allowed have missed the limit.

    Counts the first tokens that the server says it gave since ``before``, against the requests whose limit
    is over.  Servers without vLLM's metrics are never overdue.
    """

    def __init__(
        self, client: Client, before: dict[str, float], schedule: Sequence[TimedRequest], s: LoadSettings
    ) -> None:
        self._client, self._first_tokens = client, before.get(FIRST_TOKENS, 0.0)
        self._limits = [request.at - schedule[0].at + s.limit_s + PUBLISHED_S for request in schedule]
        self._allowed = misses_allowed(s.requests, s.percentile)
        self._begin: float | None = None
        """When the first request was seen at the server: not before it was sent."""

    def __call__(self) -> bool:
        found = self._client.metrics() or {}
        given, now = found.get(FIRST_TOKENS, 0.0) - self._first_tokens, time.monotonic()
        if self._begin is None:
            if not (given or working(found)):
                return False
            self._begin = now
        return sum(limit < now - self._begin for limit in self._limits) - given > self._allowed


def make_point(
    server: str,
    rate: float,
    first: int,
    outcomes: list[Outcome],
    s: LoadSettings,
    *,
    cached: int = 0,
    replayed: bool = False,
) -> RatePoint:
    """What the outcomes of one window say; figures only where every request was answered."""
    ends = Counter(o.end.value for o in outcomes)
    complete = ends[End.DONE.value] == s.requests
    misses = sum(_missed(o, s.limit_s) for o in outcomes)
    span = max((o.ended for o in outcomes), default=0.0)
    facts: dict[str, Any] = {}
    if complete:
        ttfts = [o.ttft for o in outcomes if o.ttft is not None]
        prompt = sum(o.prompt_tokens for o in outcomes)
        facts = {
            "ttft_s": Percentiles.of(ttfts),
            "gap_s": Percentiles.of([gap for o in outcomes for gap in o.gaps]),
            "tpot_s": Percentiles.of([o.tpot for o in outcomes if o.tpot is not None]),
            "output_tokens_per_s": sum(o.output_tokens for o in outcomes) / span,
            "prompt_tokens_per_s": prompt / span,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "ttfts": ttfts,
        }
    return RatePoint(
        server=server,
        rate=rate,
        first_request=first,
        requests=s.requests,
        replayed=replayed,
        ends=dict(ends),
        errors=list(dict.fromkeys(o.error for o in outcomes if o.error))[:3],
        within=complete and misses <= misses_allowed(s.requests, s.percentile),
        complete=complete,
        late_s=max((o.late for o in outcomes), default=0.0),
        seconds=span,
        **facts,
    )


def ratios(sustained: Sequence[Sustained]) -> list[Ratio]:
    """Return every other server's rate over the best stock server's; over the last server's without stock."""
    if len(sustained) < 2:
        return []
    stock = [s for s in sustained if s.server.split()[0] == STOCK]
    base = max(stock or sustained[-1:], key=lambda s: s.rate or 0.0)

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    return [
        Ratio(
            s.server,
            base.server,
            over(s.rate, base.rate),
            low=over(s.rate, base.failed_rate),
            high=over(s.failed_rate, base.rate),
        )
        for s in sustained
        if s is not base
    ]


def _missed(outcome: Outcome, limit_s: float) -> bool:
    if outcome.end is End.STOPPED:
        return False
    return outcome.end is not End.DONE or outcome.ttft is None or outcome.ttft > limit_s


def _cached(metrics: dict[str, float]) -> int:
    return int(metrics.get("vllm:prompt_tokens_cached_total", 0))


def _answered(target: Target, body: dict[str, Any]) -> int:
    """Tokens of the prompt in ``body``, which the server must answer."""
    try:
        return target.client.prompt_tokens(body)
    except ClientError as e:
        raise GateFailed(f"{target.name}: {e}") from e


def _twice(target: Target, body: dict[str, Any]) -> tuple[Complete, Complete]:
    """The same request two times, with log-probabilities."""
    try:
        first = target.client.complete({**body, "logprobs": 5})
        return first, target.client.complete({**body, "logprobs": 5})
    except ClientError as e:
        raise GateFailed(f"{target.name}: {e}") from e


def _require_same(name: str, cold: Complete, warm: Complete) -> None:
    for what in ("tokens", "logprobs", "top_logprobs"):
        if getattr(cold, what) != getattr(warm, what):
            raise GateFailed(
                f"{name}: cold and warm answers to the same prompt have different {what}: "
                f"{getattr(cold, what)[:3]} and {getattr(warm, what)[:3]}"
            )


def _line(point: RatePoint, s: LoadSettings) -> str:
    head = f"{point.server}, {point.rate:.3g} requests/s: "
    if not point.complete:
        ends = ", ".join(f"{n} {end}" for end, n in point.ends.items())
        verdict = "failed" if point.failed else "over the limit"
        return head + f"{verdict} ({ends})" + "".join(f"; {e}" for e in point.errors)
    assert point.ttft_s is not None
    value = percentile(point.ttfts, s.percentile)
    late = f"; the client itself was {seconds(point.late_s)} late" if point.late_s > LATE * s.limit_s else ""
    return head + f"p{s.percentile} {seconds(value)}, {'within' if point.within else 'over'} the limit{late}"
