"""A trace replayed against one cache: by the engine's policies and ledger, and by two that know the future.

A request first reads what the cache has, then puts what was missing, in prompt order.  All outcomes keep to
this, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hypic.store.eviction.base import EvictionPolicy
from vllm_hypic.store.tiers.ledger import Ledger, Plan
from vllm_hypic.store.worth import ObjectName, Worth

from .eviction_shapes import RecordShape
from .eviction_traces import Request


@dataclass(frozen=True)
class Accesses:
    """A trace with the sizes of one model: names of objects by request, each once, and their worths."""

    requests: tuple[tuple[ObjectName, ...], ...]
    worths: Mapping[ObjectName, Worth]

    @classmethod
    def of(cls, trace: Sequence[Request], shape: RecordShape) -> Accesses:
        worths: dict[ObjectName, Worth] = {}
        requests = []
        for request in trace:
            names = []
            for key, tokens in request.records():
                name = ObjectName(key)
                if name not in worths:
                    worths[name] = shape.worth(tokens)
                names.append(name)
            requests.append(tuple(names))
        return cls(tuple(requests), worths)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.requests)

    @property
    def footprint(self) -> int:
        """Bytes of all objects together: a cache of this size evicts nothing."""
        return sum(worth.nbytes for worth in self.worths.values())

    def asked(self) -> Saved:
        total = Tally()
        for names in self.requests:
            for name in names:
                total.add(self.worths[name])
        return total.saved()


@dataclass(frozen=True)
class Saved:
    """Prefill that hits made superfluous."""

    tokens: int
    flops: float


@dataclass
class Tally:
    tokens: int = 0
    flops: float = 0.0

    def add(self, worth: Worth) -> None:
        self.tokens += worth.tokens
        self.flops += worth.flops

    def saved(self) -> Saved:
        return Saved(self.tokens, self.flops)


def replay(accesses: Accesses, budget: int, policy: EvictionPolicy) -> Saved:
    """What the policy, which must be new, saves with so many bytes, beginning empty."""
    ledger, hits = Ledger(budget, policy), Tally()
    for names in accesses.requests:
        missing = []
        for name in names:
            if name in ledger:
                ledger.hit(name)
                hits.add(accesses.worths[name])
            else:
                missing.append(name)
        for name in missing:
            worth = accesses.worths[name]
            ledger.missed(name, worth)
            plan = ledger.plan_put(name, worth)
            if isinstance(plan, Plan):
                ledger.reserve(plan)
                ledger.commit(plan)
    ledger.check_integrity()
    return hits.saved()


# -- with knowledge of the future --------------------------------------------------------------------


@dataclass(frozen=True)
class Reuses:
    """Two requests in a row that ask for the same object, as arrays; ``gaps``: from one to the other."""

    tokens: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    gaps: np.ndarray


def reuses(accesses: Accesses) -> Reuses:
    last: dict[ObjectName, int] = {}
    rows = []
    for at, names in enumerate(accesses.requests):
        for name in names:
            if name in last:
                worth = accesses.worths[name]
                rows.append((worth.tokens, worth.flops, worth.nbytes, at - last[name]))
            last[name] = at
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Reuses(*columns)


def upper_bound(accesses: Accesses, budget: int) -> float:
    """FLOPs that no cache of this size can exceed, whatever it knows.

    A hit needs the object's bytes from the request before to this one.  All hits together cannot need more
    than ``budget`` bytes times the requests of the trace; filling that with the reuses that save most FLOPs
    per byte and request, the last one in part, is the fractional knapsack.  That the budget also holds at
    every single moment is left out, hence a bound and not the optimum.
    """
    found = reuses(accesses)
    fits = found.nbytes <= budget
    flops, cost = found.flops[fits], (found.nbytes * found.gaps)[fits]
    order = np.argsort(-flops / cost)
    room = float(budget) * max(0, len(accesses.requests) - 1)
    before = np.concatenate([[0.0], np.cumsum(cost[order])])[:-1]
    part = np.clip((room - before) / cost[order], 0.0, 1.0)
    return float(np.sum(part * flops[order]))


def offline_greedy(accesses: Accesses, budget: int) -> Saved:
    """Belady's rule with values: when room is short, what saves least FLOPs per byte and request until its
    next use goes, the newcomer among the candidates.  Knows the future, but looks one use ahead: a strong
    reference, at or below the optimum.
    """
    numbers = {name: i for i, name in enumerate(accesses.worths)}
    worths = list(accesses.worths.values())
    requests = [[numbers[name] for name in names] for names in accesses.requests]
    density = np.array([worth.flops_per_byte for worth in worths])
    nbytes = [worth.nbytes for worth in worths]
    following = _next_uses(requests, len(worths))
    next_use = np.full(len(worths), np.inf)
    held: list[int] = []
    place: dict[int, int] = {}
    used, hits = 0, Tally()

    def leave(number: int) -> None:
        nonlocal used
        at, last = place.pop(number), held.pop()
        if last != number:
            held[at], place[last] = last, at
        used -= nbytes[number]

    for at, names in enumerate(requests):
        missing = []
        for number, later in zip(names, following[at], strict=True):
            next_use[number] = later
            if number in place:
                hits.add(worths[number])
            else:
                missing.append(number)
        for number in missing:
            if nbytes[number] > budget or next_use[number] == np.inf:
                continue
            place[number] = len(held)
            held.append(number)
            used += nbytes[number]
            if used > budget:
                rows = np.array(held)
                value = density[rows] / (next_use[rows] - at)
                for row in rows[np.argsort(value, kind="stable")]:
                    leave(int(row))
                    if used <= budget:
                        break
    return hits.saved()


def _next_uses(requests: Sequence[Sequence[int]], objects: int) -> list[list[float]]:
    """For every object of every request, the number of the next request that asks for it, or infinity."""
    later = [np.inf] * objects
    found: list[list[float]] = []
    for at in range(len(requests) - 1, -1, -1):
        found.append([later[number] for number in requests[at]])
        for number in requests[at]:
            later[number] = at
    return found[::-1]
