"""A trace replayed against one cache: by the engine's policies and capacity index, and by two that know the
future.

A request first reads what the cache has, then puts what was missing, in prompt order.  All outcomes keep to
this, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hypic.store.eviction.policy import EvictionPolicy
from vllm_hypic.store.protocol import CacheValue, ObjectName
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Plan

from .eviction_shapes import RecordShape
from .eviction_traces import Request


@dataclass(frozen=True)
class Accesses:
    """A trace with the sizes of one model: names of objects by request, each once, and their cache values."""

    requests: tuple[tuple[ObjectName, ...], ...]
    cache_values: Mapping[ObjectName, CacheValue]

    @classmethod
    def of(cls, trace: Sequence[Request], shape: RecordShape) -> Accesses:
        values: dict[ObjectName, CacheValue] = {}
        requests = []
        for request in trace:
            names = []
            for key, tokens in request.records():
                name = ObjectName(key)
                if name not in values:
                    values[name] = shape.value(tokens)
                names.append(name)
            requests.append(tuple(names))
        return cls(tuple(requests), values)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.requests)

    @property
    def footprint(self) -> int:
        """Bytes of all objects together: a cache of this size evicts nothing."""
        return sum(value.nbytes for value in self.cache_values.values())

    def asked(self) -> Saved:
        total = Tally()
        for names in self.requests:
            for name in names:
                total.add(self.cache_values[name])
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

    def add(self, value: CacheValue) -> None:
        self.tokens += value.tokens
        self.flops += value.flops

    def saved(self) -> Saved:
        return Saved(self.tokens, self.flops)


def replay(accesses: Accesses, budget: int, policy: EvictionPolicy) -> Saved:
    """What the policy, which must be new, saves with so many bytes, beginning empty."""
    index, hits = CapacityIndex(budget, policy), Tally()
    for names in accesses.requests:
        missing = []
        for name in names:
            if name in index:
                index.hit(name)
                hits.add(accesses.cache_values[name])
            else:
                missing.append(name)
        for name in missing:
            value = accesses.cache_values[name]
            index.missed(name, value)
            plan = index.plan_put(name, value)
            if isinstance(plan, Plan):
                index.reserve(plan)
                index.commit(plan)
    index.check_integrity()
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
                value = accesses.cache_values[name]
                rows.append((value.tokens, value.flops, value.nbytes, at - last[name]))
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
    numbers = {name: i for i, name in enumerate(accesses.cache_values)}
    values = list(accesses.cache_values.values())
    requests = [[numbers[name] for name in names] for names in accesses.requests]
    density = np.array([value.flops_per_byte for value in values])
    nbytes = [value.nbytes for value in values]
    following = _next_uses(requests, len(values))
    next_use = np.full(len(values), np.inf)
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
                hits.add(values[number])
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
    """The number, for every object of every request, of the next request that asks for it, or infinity."""
    later = [np.inf] * objects
    found: list[list[float]] = []
    for at in range(len(requests) - 1, -1, -1):
        found.append([later[number] for number in requests[at]])
        for number in requests[at]:
            later[number] = at
    return found[::-1]
