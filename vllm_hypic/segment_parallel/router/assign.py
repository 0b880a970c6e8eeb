"""Which records of a request are missing at its combine node, and who sends or computes each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..lpt import assign
from .instances import Instance
from .plan import Planned, SegmentAsk

HELD_COST = 0.05
"""Of a segment's tokens: what sending a record costs beside computing it."""


class Source(Enum):
    """How a missing record gets to the combine node."""

    DISPATCHED = "dispatched"
    """A worker computes it."""
    JOINED = "joined"
    """A worker computes it already, for another request."""
    HELD = "held"
    """A worker has it."""


@dataclass(frozen=True)
class Task:
    """One record that ``worker`` is to send.  ``cost``: tokens that it has to compute for it."""

    ask: SegmentAsk
    worker: Instance
    source: Source
    cost: int


@dataclass(frozen=True)
class Decision:
    """How one request is spread.  ``tasks``: longest first; ``local``: what the combine node computes."""

    combine: Instance
    tasks: tuple[Task, ...]
    local: tuple[SegmentAsk, ...]
    gain: float
    """Share of the predicted time to the first token that is saved against the best single instance."""


def missing_tokens(planned: Planned, instance: Instance) -> int:
    """What it would have to prefill to answer alone."""
    segments = sum(
        s.tokens for s in planned.segments if not (instance.holds(s.key) or s.key in instance.view.pending)
    )
    return segments + planned.stream_tokens


def decide(
    planned: Planned,
    combine: Instance,
    instances: Sequence[Instance],
    computing: Callable[[str], Instance | None],
) -> Decision:
    """Spread what ``combine`` misses over ``instances``, which may take part now.

    A record goes to whoever has it, then to whoever computes it (``computing``: for a request of ours; or so
    its events say), the rest by LPT to those whose role is prefill.  Changes nothing.
    """
    others = [i for i in instances if i is not combine]
    missing = [s for s in planned.segments if not (combine.holds(s.key) or s.key in combine.view.pending)]
    loads = {i: float(i.load) for i in instances}
    loads[combine] = float(combine.load)
    before = dict(loads)
    tasks: list[Task] = []
    rest: list[SegmentAsk] = []
    for ask in missing:
        found = _known_source(ask, others, loads, computing)
        if found is None:
            rest.append(ask)
            continue
        worker, source = found
        tasks.append(Task(ask, worker, source, 0))
        loads[worker] += HELD_COST * ask.tokens
    local: list[SegmentAsk] = []
    for group, machines in _groups(planned, combine, others, rest):
        places = assign([a.tokens for a in group], [loads[m] for m in machines])
        for ask, place in zip(group, places, strict=True):
            worker = machines[place]
            loads[worker] += ask.tokens
            if worker is combine:
                local.append(ask)
            else:
                tasks.append(Task(ask, worker, Source.DISPATCHED, ask.tokens))
    tasks.sort(key=lambda t: -t.ask.tokens)
    alone = before[combine] + sum(a.tokens for a in missing) + planned.stream_tokens
    ends = [loads[t.worker] for t in tasks] + [loads[combine]]
    spread = max(ends) + planned.stream_tokens
    gain = 0.0 if not tasks or len(missing) < 2 or not alone else 1 - spread / alone
    return Decision(combine, tuple(tasks), tuple(local), gain)


def _known_source(
    ask: SegmentAsk,
    others: Sequence[Instance],
    loads: dict[Instance, float],
    computing: Callable[[str], Instance | None],
) -> tuple[Instance, Source] | None:
    holders = [i for i in others if i.holds(ask.key)]
    if holders:
        return min(holders, key=loads.__getitem__), Source.HELD
    busy = computing(ask.key)
    if busy is not None and busy in others:
        return busy, Source.JOINED
    pending = [i for i in others if ask.key in i.view.pending]
    return (min(pending, key=loads.__getitem__), Source.JOINED) if pending else None


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
