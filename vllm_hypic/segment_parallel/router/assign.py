"""Assignment: finds the records that a request's combine node lacks, and a source for each record.

Missing records are work for machines: longest processing time first (LPT, Graham 1969).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from .instances import Instance
from .plan import Planned, SegmentAsk

MOST_REMOTE = 4096
"""Limit on the records from other instances that an engine lets one request wait for."""
HELD_COST = 0.05
"""Cost of sending a record, as a share of the cost of computing its tokens."""


class RecordSource(Enum):
    """Ways in which the combine node gets a missing record."""

    DISPATCHED = "dispatched"
    """A worker computes the record for this request."""
    JOINED = "joined"
    """A worker already computes the record for another request."""
    HELD = "held"
    """A worker has the record."""


@dataclass(frozen=True)
class Assignment:
    """One record that ``worker`` must send.  ``cost``: tokens that the worker must compute for the record."""

    ask: SegmentAsk
    worker: Instance
    source: RecordSource
    cost: int


@dataclass(frozen=True)
class Decision:
    """Distribution of one request.  ``tasks``: records that workers send, longest first; ``local``: records
    that the combine node computes."""

    combine: Instance
    tasks: tuple[Assignment, ...]
    coming: tuple[SegmentAsk, ...]
    """Records that are already on their way to this combine node, for other requests of this router."""
    local: tuple[SegmentAsk, ...]
    gain: float
    """Prefill saved before the first token, as a share of the combine node's prefill if it worked alone."""

    def only_joining(self) -> Decision:
        """Return the decision with joined tasks only; the combine node computes all other tasks' records."""
        joined = tuple(t for t in self.tasks if t.source is RecordSource.JOINED)
        others = (t.ask for t in self.tasks if t.source is not RecordSource.JOINED)
        return replace(self, tasks=joined, local=(*self.local, *others))

    @property
    def joins(self) -> bool:
        """Whether the request waits for records that are computed or sent for other requests."""
        return bool(self.coming) or any(t.source is RecordSource.JOINED for t in self.tasks)


class Traffic(Protocol):
    """Transfers under way, as a request with one client's rights may use them."""

    def computing(self, key: str) -> Instance | None:
        """Return the worker that was last asked for the record, for any combine node, or ``None``."""

    def coming(self, key: str, combine: Instance) -> bool:
        """Whether the record is on its way to ``combine``."""


def missing(planned: Planned, instance: Instance, traffic: Traffic) -> list[SegmentAsk]:
    """Return the request's records that ``instance`` neither has nor computes, and no transfer brings."""
    return [
        s
        for s in planned.segments
        if not instance.holds(s.key) and not instance.makes(s.key) and not traffic.coming(s.key, instance)
    ]


def decide(planned: Planned, combine: Instance, instances: Sequence[Instance], traffic: Traffic) -> Decision:
    """Distribute the records that ``combine`` lacks over ``instances``, which may take part now.

    The first choice for a record is an instance that has it.  The second choice is an instance that computes
    it already, according to the router's own requests or the instance's events.  LPT distributes all other
    records over the instances with role prefill.  Arguments and shared state stay unchanged.
    """
    others = [i for i in instances if i is not combine]
    wanted = missing(planned, combine, traffic)
    loads = {i: float(i.load) for i in instances}
    loads[combine] = float(combine.load)
    alone = loads[combine] + sum(a.tokens for a in wanted) + planned.stream_tokens
    tasks: list[Assignment] = []
    rest: list[SegmentAsk] = []
    for ask in wanted:
        found = _known_source(ask, others, loads, traffic)
        if found is None:
            rest.append(ask)
            continue
        worker, source = found
        tasks.append(Assignment(ask, worker, source, 0))
        loads[worker] += HELD_COST * ask.tokens
    local: list[SegmentAsk] = []
    for group, machines in _groups(planned, combine, others, rest):
        places = assign([_weight(a, planned) for a in group], [loads[m] for m in machines])
        for ask, place in zip(group, places, strict=True):
            worker = machines[place]
            loads[worker] += ask.tokens
            if worker is combine:
                local.append(ask)
            else:
                tasks.append(Assignment(ask, worker, RecordSource.DISPATCHED, ask.tokens))
    tasks.sort(key=lambda t: -t.ask.tokens)
    coming = tuple(s for s in planned.segments if traffic.coming(s.key, combine))[:MOST_REMOTE]
    most = MOST_REMOTE - len(coming)
    tasks, local = tasks[:most], [*local, *(t.ask for t in tasks[most:])]
    # A worker sends a record that it has, or computes already, beside its other work, without a queue.
    held = HELD_COST * sum(t.ask.tokens for t in tasks if t.source is RecordSource.HELD)
    ends = [loads[t.worker] for t in tasks if t.source is RecordSource.DISPATCHED]
    spread = max([loads[combine] + held, *ends]) + planned.stream_tokens
    work = sum(a.tokens for a in wanted) + planned.stream_tokens
    # The combine node itself computes a single missing segment that no instance has or computes.
    useful = len(wanted) > 1 or any(t.source is not RecordSource.DISPATCHED for t in tasks)
    return Decision(
        combine,
        tuple(tasks),
        coming,
        tuple(local),
        (alone - spread) / work if tasks and useful else 0.0,
    )


def _weight(ask: SegmentAsk, planned: Planned) -> float:
    """Return the cost of a segment's prefill, in units of a token's FLOPs without attention."""
    return ask.tokens + planned.description.quadratic * ask.tokens**2


def _known_source(
    ask: SegmentAsk,
    others: Sequence[Instance],
    loads: dict[Instance, float],
    traffic: Traffic,
) -> tuple[Instance, RecordSource] | None:
    if not ask.prompt:
        return None
    holders = [i for i in others if i.holds(ask.key)]
    if holders:
        return min(holders, key=loads.__getitem__), RecordSource.HELD
    busy = traffic.computing(ask.key)
    if busy is not None and busy in others:
        return busy, RecordSource.JOINED
    pending = [i for i in others if i.makes(ask.key)]
    return (min(pending, key=loads.__getitem__), RecordSource.JOINED) if pending else None


def _groups(
    planned: Planned, combine: Instance, others: Sequence[Instance], rest: Sequence[SegmentAsk]
) -> list[tuple[list[SegmentAsk], list[Instance]]]:
    """Return segments in groups, each with the instances that can compute it; one group if pools are alike.

    A combine node with role prefill is in every group.  Any combine node computes the segments that no worker
    can compute.
    """
    workers = [i for i in others if i.roles.prefill]
    own = [combine] if combine.roles.prefill else []
    groups: dict[tuple[int, ...], list[SegmentAsk]] = {}
    for ask in rest:
        # Most workers have equal descriptions: each distinct description is planned only once.
        makes = {w.description.planning: w.description for w in workers if w.description is not None}
        kinds = {kind for kind, description in makes.items() if planned.made_by(description, ask)}
        able = tuple(n for n, w in enumerate(workers) if w.description and w.description.planning in kinds)
        groups.setdefault(able, []).append(ask)
    return [(asks, [*(workers[n] for n in able), *own] or [combine]) for able, asks in groups.items()]


def assign(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return the machine's index for each cost: the largest cost first, each to the least loaded machine.

    Costs and loads share one unit (tokens or seconds), and are >= 0 and finite.  All machines are equally
    fast.

    ``loads``: work that each machine already has.  Ties go to the lowest index, of costs and of machines, so
    that the result depends on the arguments alone.  On m idle machines the last machine finishes at most
    4/3 - 1/(3 m) times as late as in the best assignment.

    Raises ``ValueError`` for a cost or load that is negative or not finite, and for costs without machines.
    """
    check_numbers("cost", costs)
    check_numbers("load", loads)
    if not costs:
        return []
    if not loads:
        raise ValueError(f"{len(costs)} costs and no machine: expected at least one load")
    machines = [(load, i) for i, load in enumerate(loads)]
    heapq.heapify(machines)
    found = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable sort: ties by index
        load, machine = machines[0]
        found[piece] = machine
        heapq.heapreplace(machines, (load + costs[piece], machine))
    return found


def check_numbers(what: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < math.inf:  # NaN fails too
            raise ValueError(f"{what} {value!r}: expected a finite number >= 0")
