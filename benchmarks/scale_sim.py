"""Discrete-event simulation of segment-parallel prefill: router, workers, network, combine nodes.

Deterministic: the same arguments give the same times.  Every station serves one thing at a time, first come,
first served:

- router: ``plan_s`` a request, then its segments one after another, ``dispatch_s`` each
- worker: prefills its segments in the order in which they were sent
- a worker's link and the combine node's way in: a transfer holds both, each for its bytes over its bandwidth
- combine node: composes a request when all its records were received

Pipelined, a worker computes on while its record travels; otherwise it waits until the record was received.
Decoding, hits and failures are not modelled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_hypic.segment_parallel.router.assign import assign

from .makespan import lower_bound, optimal_makespan
from .scale_model import Costs, Piece, Request

PROOF_STEPS = 100_000
"""Steps of the search for one request's optimum, before its lower bound has to do."""


class Policy(Enum):
    """Which worker gets which segment."""

    LPT = "lpt by tokens"
    """Longest first, by tokens, over the workers' present loads in tokens."""
    LPT_FLOPS = "lpt by flops"
    """The same, but by the prefill's FLOPs, as the router weighs them."""
    LPT_TIME = "lpt by time"
    """The same by prefill times, in which attention's square is counted."""
    LPT_BLIND = "lpt, loads unknown"
    """LPT by tokens, as if all workers were idle."""
    ROUND_ROBIN = "round robin"
    """Round robin in the prompt's order, going on where the last request ended."""


@dataclass(frozen=True)
class Cluster:
    workers: int
    policy: Policy = Policy.LPT
    pipelined: bool = True
    combiners: int = 1
    """Nodes beside the workers that only combine."""

    def __post_init__(self) -> None:
        for name in ("workers", "combiners"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: expected at least 1")


@dataclass(frozen=True)
class Times:
    """Times of one request, on the simulation's clock."""

    arrival_s: float
    begun_s: float
    """Its first segment has reached a worker's queue."""
    prefilled_s: float
    """Its last segment is computed."""
    received_s: float
    """When its last record was received."""
    first_token_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s


@dataclass(frozen=True)
class Outcome:
    times: tuple[Times, ...]
    """Times in the order of the requests."""
    busy_s: tuple[float, ...]
    """What every worker has computed."""
    combining_s: tuple[float, ...]
    """What every combine node has computed."""


def simulate(requests: Sequence[Request], cluster: Cluster, costs: Costs) -> Outcome:
    """Serve the requests, which are in order of arrival, to the end."""
    return _Run(requests, cluster, costs).run()


def simulate_whole(requests: Sequence[Request], instances: int, costs: Costs) -> tuple[Times, ...]:
    """The same without segment parallelism: every request goes whole to the instance with the least to do."""
    costs_of = [(request.tokens, request.prefill_s, request.compose_s) for request in requests]
    free = [0.0] * instances
    loads = [0] * instances
    leaving: list[tuple[float, int, int]] = []  # when, instance, tokens
    router, found = 0.0, []
    for request, (tokens, prefill_s, compose_s) in zip(requests, costs_of, strict=True):
        router = max(router, request.arrival_s) + costs.plan_s + costs.dispatch_s
        while leaving and leaving[0][0] <= router:
            _, instance, done = heapq.heappop(leaving)
            loads[instance] -= done
        [instance] = assign([tokens], loads)
        loads[instance] += tokens
        begun = router + costs.admit_s
        prefilled = max(free[instance], begun) + prefill_s
        free[instance] = prefilled + compose_s
        heapq.heappush(leaving, (free[instance], instance, tokens))
        found.append(Times(request.arrival_s, begun, prefilled, prefilled, free[instance]))
    return tuple(found)


def alone_s(request: Request, costs: Costs) -> float:
    """Time to first token on one idle instance, which is asked directly."""
    return costs.admit_s + request.prefill_s + request.compose_s


def least_s(request: Request, workers: int, costs: Costs) -> tuple[float, bool]:
    """What no assignment of one request to idle workers can beat, and whether its makespan is the optimum.

    Where the optimum takes too long to prove, its lower bound stands instead.
    """
    prefills = [piece.prefill_s for piece in request.pieces]
    try:
        makespan, proven = optimal_makespan(prefills, workers, PROOF_STEPS), True
    except ValueError:
        makespan, proven = lower_bound(prefills, workers), False
    lightest = min(piece.nbytes for piece in request.pieces)
    transfer = costs.round_trip_s + lightest / min(costs.link_bytes_s, costs.ingress_bytes_s)
    return costs.plan_s + costs.dispatch_s + costs.admit_s + makespan + transfer + request.compose_s, proven


class _Worker:
    def __init__(self) -> None:
        self.queue: deque[tuple[int, Piece]] = deque()
        self.outbox: deque[tuple[int, Piece]] = deque()
        self.computing = self.sending = False
        self.load = 0.0
        """Weights of what was sent to it and is not computed yet: what the router sees."""
        self.busy_s = 0.0


class _Combiner:
    def __init__(self) -> None:
        self.way_in_free_s = self.free_s = self.busy_s = 0.0
        self.requests = 0


class _Open:
    """A request under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.left = len(request.pieces)
        self.combiner = 0
        self.begun_s = self.prefilled_s = self.received_s = self.first_token_s = 0.0

    def times(self) -> Times:
        return Times(
            self.request.arrival_s, self.begun_s, self.prefilled_s, self.received_s, self.first_token_s
        )


class _Run:
    def __init__(self, requests: Sequence[Request], cluster: Cluster, costs: Costs) -> None:
        self._costs, self._cluster = costs, cluster
        self._open = [_Open(request) for request in requests]
        self._workers = [_Worker() for _ in range(cluster.workers)]
        self._combiners = [_Combiner() for _ in range(cluster.combiners)]
        self._router_free_s = 0.0
        self._turn = 0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def run(self) -> Outcome:
        for i, one in enumerate(self._open):
            self._at(one.request.arrival_s, lambda i=i: self._arrive(i))  # type: ignore[misc]
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return Outcome(
            tuple(one.times() for one in self._open),
            tuple(worker.busy_s for worker in self._workers),
            tuple(combiner.busy_s for combiner in self._combiners),
        )

    def _at(self, when: float, act: Callable[[], None]) -> None:
        # The count: events of the same time in the order in which they were scheduled.
        heapq.heappush(self._events, (when, self._scheduled, act))
        self._scheduled += 1

    # -- router

    def _arrive(self, i: int) -> None:
        planned = max(self._now, self._router_free_s) + self._costs.plan_s
        self._router_free_s = planned + self._costs.dispatch_s * len(self._open[i].request.pieces)
        self._at(planned, lambda: self._plan(i))

    def _plan(self, i: int) -> None:
        one = self._open[i]
        waiting = [combiner.requests for combiner in self._combiners]
        one.combiner = waiting.index(min(waiting))
        self._combiners[one.combiner].requests += 1
        pieces = one.request.pieces
        if not pieces:
            one.begun_s = one.prefilled_s = self._now + self._costs.admit_s
            self._at(one.begun_s, lambda: self._complete(i))
            return
        weights = [self._weight(piece) for piece in pieces]
        chosen = self._assign(weights)
        order = list(range(len(pieces)))
        if self._cluster.policy is not Policy.ROUND_ROBIN:
            order.sort(key=weights.__getitem__, reverse=True)
        for sent, j in enumerate(order, 1):
            self._workers[chosen[j]].load += weights[j]
            when = self._now + sent * self._costs.dispatch_s + self._costs.admit_s
            if sent == 1:
                one.begun_s = when
            self._at(when, lambda w=self._workers[chosen[j]], p=pieces[j]: self._queue(w, i, p))  # type: ignore[misc]

    def _weight(self, piece: Piece) -> float:
        if self._cluster.policy is Policy.LPT_TIME:
            return piece.prefill_s
        quadratic = self._costs.flops_quadratic if self._cluster.policy is Policy.LPT_FLOPS else 0.0
        return piece.tokens + quadratic * piece.tokens**2

    def _assign(self, weights: Sequence[float]) -> list[int]:
        n = len(self._workers)
        if self._cluster.policy is Policy.ROUND_ROBIN:
            first, self._turn = self._turn, self._turn + len(weights)
            return [(first + j) % n for j in range(len(weights))]
        blind = self._cluster.policy is Policy.LPT_BLIND
        return assign(weights, [0.0 if blind else worker.load for worker in self._workers])

    # -- worker and its link

    def _queue(self, worker: _Worker, i: int, piece: Piece) -> None:
        worker.queue.append((i, piece))
        self._compute(worker)

    def _compute(self, worker: _Worker) -> None:
        if not worker.computing and worker.queue:
            worker.computing = True
            i, piece = worker.queue.popleft()
            self._at(self._now + piece.prefill_s, lambda: self._computed(worker, i, piece))

    def _computed(self, worker: _Worker, i: int, piece: Piece) -> None:
        worker.busy_s += piece.prefill_s
        worker.load = max(0.0, worker.load - self._weight(piece))  # sums of seconds may miss 0 by a little
        self._open[i].prefilled_s = self._now  # the last one stays
        worker.outbox.append((i, piece))
        self._send(worker)
        if self._cluster.pipelined:
            worker.computing = False
            self._compute(worker)

    def _send(self, worker: _Worker) -> None:
        if worker.sending or not worker.outbox:
            return
        worker.sending = True
        i, piece = worker.outbox.popleft()
        combiner = self._combiners[self._open[i].combiner]
        agreed = self._now + self._costs.round_trip_s
        # Cut through: both ways are held at once, and the record is there when the slower one is through.
        combiner.way_in_free_s = (
            max(agreed, combiner.way_in_free_s) + piece.nbytes / self._costs.ingress_bytes_s
        )
        received = max(combiner.way_in_free_s, agreed + piece.nbytes / self._costs.link_bytes_s)
        self._at(received, lambda: self._received(worker, i))

    def _received(self, worker: _Worker, i: int) -> None:
        worker.sending = False
        self._send(worker)
        if not self._cluster.pipelined:
            worker.computing = False
            self._compute(worker)
        one = self._open[i]
        one.left -= 1
        if not one.left:
            self._complete(i)

    # -- combine node

    def _complete(self, i: int) -> None:
        one = self._open[i]
        combiner = self._combiners[one.combiner]
        one.received_s = self._now
        one.first_token_s = max(self._now, combiner.free_s) + one.request.compose_s
        combiner.free_s = one.first_token_s
        combiner.busy_s += one.request.compose_s
        self._at(one.first_token_s, lambda: self._answered(combiner))

    def _answered(self, combiner: _Combiner) -> None:
        combiner.requests -= 1
