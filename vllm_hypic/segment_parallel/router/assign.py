"""Which records of a request are missing at its combine node, and who sends or computes each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from ..lpt import assign
from .instances import Instance
from .plan import Planned, SegmentAsk

MOST_REMOTE = 4096
"""Records of others that an engine lets one request wait for."""
HELD_COST = 0.05
"""Sending a record costs this share of what computing its tokens does."""


class RecordSource(Enum):
    """How a missing record gets to the combine node."""

    DISPATCHED = "dispatched"
    """A worker computes it."""
    JOINED = "joined"
    """A worker computes it already, for another request."""
    HELD = "held"
    """A worker has it."""


@dataclass(frozen=True)
class Assignment:
    """One record that ``worker`` is to send.  ``cost``: tokens that it has to compute for it."""

    ask: SegmentAsk
    worker: Instance
    source: RecordSource
    cost: int


@dataclass(frozen=True)
class Decision:
    """How one request is spread.  ``tasks``: longest first; ``local``: what the combine node computes."""

    combine: Instance
    tasks: tuple[Assignment, ...]
    coming: tuple[SegmentAsk, ...]
    """Records that are on their way to this combine node already, for other requests of ours."""
    local: tuple[SegmentAsk, ...]
    gain: float
    """Prefill that the first token does not wait for, against the best single instance, as a share of what
    that one would have to prefill."""

    def only_joining(self) -> Decision:
        """Nobody computes for it what nobody computes anyway: that is left to the combine node."""
        joined = tuple(t for t in self.tasks if t.source is RecordSource.JOINED)
        others = (t.ask for t in self.tasks if t.source is not RecordSource.JOINED)
        return replace(self, tasks=joined, local=(*self.local, *others))

    @property
    def joins(self) -> bool:
        """Whether it waits for what is computed or sent for other requests."""
        return bool(self.coming) or any(t.source is RecordSource.JOINED for t in self.tasks)


class Traffic(Protocol):
    """What is under way for one client's rights."""

    def computing(self, key: str) -> Instance | None:
        """The worker that was asked for it, for whatever combine node."""

    def coming(self, key: str, combine: Instance) -> bool:
        """Whether it is on its way to that combine node."""


def missing(planned: Planned, instance: Instance, traffic: Traffic) -> list[SegmentAsk]:
    """Records of a request that ``instance`` does not have and nobody makes or sends for it."""
    return [
        s
        for s in planned.segments
        if not instance.holds(s.key) and not instance.makes(s.key) and not traffic.coming(s.key, instance)
    ]


def decide(planned: Planned, combine: Instance, instances: Sequence[Instance], traffic: Traffic) -> Decision:
    """Spread what ``combine`` misses over ``instances``, which may take part now.

    A record comes from whoever has it, else from whoever computes it (for another request of ours, or so its
    events say), the rest by LPT from those whose role is prefill.  Changes nothing.
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
    # Who has a record, or will, sends it beside what else there is to do: no queue is waited for.
    held = HELD_COST * sum(t.ask.tokens for t in tasks if t.source is RecordSource.HELD)
    ends = [loads[t.worker] for t in tasks if t.source is RecordSource.DISPATCHED]
    spread = max([loads[combine] + held, *ends]) + planned.stream_tokens
    work = sum(a.tokens for a in wanted) + planned.stream_tokens
    # One segment that somebody must compute is computed where it is wanted.
    useful = len(wanted) > 1 or any(t.source is not RecordSource.DISPATCHED for t in tasks)
    return Decision(
        combine,
        tuple(tasks),
        coming,
        tuple(local),
        (alone - spread) / work if tasks and useful else 0.0,
    )


def _weight(ask: SegmentAsk, planned: Planned) -> float:
    """The cost of a segment's prefill, in units of a token's FLOPs without attention."""
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
    """Segments with the machines that can compute them: all the same ones, unless pools differ in size.

    A combine node that is also a worker computes its share; it computes what no worker can in any case.
    """
    workers = [i for i in others if i.roles.prefill]
    own = [combine] if combine.roles.prefill else []
    groups: dict[tuple[int, ...], list[SegmentAsk]] = {}
    for ask in rest:
        # Most often all workers are alike: it is found out once for each kind.
        makes = {w.description.planning: w.description for w in workers if w.description is not None}
        kinds = {kind for kind, description in makes.items() if planned.made_by(description, ask)}
        able = tuple(n for n, w in enumerate(workers) if w.description and w.description.planning in kinds)
        groups.setdefault(able, []).append(ask)
    return [(asks, [*(workers[n] for n in able), *own] or [combine]) for able, asks in groups.items()]
