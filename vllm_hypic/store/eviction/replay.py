"""How a setting of the policy would have done on recent accesses: the policy's rules, stripped to a loop.

Whether it agrees with the policy itself is a test (``tests/store/test_eviction_replay.py``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cache_value import CacheValue
from .ranking import grade, weight

Access = tuple[str, CacheValue]
YIELD_EVERY = 512
"""Accesses, about half a millisecond: how long the thread of a replay keeps others from running."""


@dataclass(frozen=True)
class Setting:
    """``alpha``: see ``ranking.py``.  ``patience``: a newcomer never seen before is weighed as if it had been
    asked for so many accesses ago; 0: every newcomer is let in; infinity: only on its second asking."""

    alpha: float = 0.0
    patience: float = 0.0


class Interrupted(Exception):
    """A replay was told to stop."""


@dataclass(frozen=True)
class Window:
    """Accesses by number of object, and per object: grade (from 0), FLOPs, bytes."""

    accesses: list[int]
    grades: list[int]
    grade_values: list[int]
    flops: list[float]
    nbytes: list[int]

    @classmethod
    def of(cls, accesses: Sequence[Access]) -> Window:
        """An object whose value changed counts with the last one."""
        values = dict(accesses)
        numbers = {key: i for i, key in enumerate(values)}
        grades = [grade(value) for value in values.values()]
        distinct = sorted(set(grades))
        ranks = {value: i for i, value in enumerate(distinct)}
        return cls(
            accesses=[numbers[key] for key, _ in accesses],
            grades=[ranks[value] for value in grades],
            grade_values=distinct,
            flops=[value.flops for value in values.values()],
            nbytes=[value.nbytes for value in values.values()],
        )

    @property
    def asked(self) -> float:
        """FLOPs of all accesses."""
        flops = self.flops
        return sum(flops[i] for i in self.accesses)

    def saved(self, budget: int, setting: Setting, stopped: Callable[[], bool] | None = None) -> float:
        """FLOPs of all hits, beginning with an empty cache of ``budget`` bytes.

        ``stopped`` is asked every now and then, and other threads get their turn; :class:`Interrupted`.
        """
        flops, nbytes, grades = self.flops, self.nbytes, self.grades
        patience, choosy = setting.patience, setting.patience > 0
        best = self.grade_values[-1] if self.grade_values else 0
        weights = [weight(value, best, setting.alpha) for value in self.grade_values]
        orders: list[OrderedDict[int, None]] = [OrderedDict() for _ in weights]
        weighted = list(zip(weights, orders, strict=True))
        last = [0] * len(flops)  # time of the last use, or asking; 0: none
        held = bytearray(len(flops))
        free, total = budget, 0.0
        now = 0
        for count, i in enumerate(self.accesses):
            if stopped is not None and not count % YIELD_EVERY:
                time.sleep(0)
                if stopped():
                    raise Interrupted
            now += 1
            before, last[i] = last[i], now
            if held[i]:
                total += flops[i]
                orders[grades[i]].move_to_end(i)
                continue
            size = nbytes[i]
            if size > budget:
                continue
            if free < size:
                victims: list[int] = []
                gained, lost = free, 0.0
                while gained < size:
                    oldest, worst = -1.0, -1
                    for factor, order in weighted:
                        if order:
                            candidate = next(iter(order))
                            age = (now + 1 - last[candidate]) * factor
                            if age > oldest:
                                oldest, worst = age, candidate
                    del orders[grades[worst]][worst]
                    victims.append(worst)
                    gained += nbytes[worst]
                    lost += flops[worst] / (now - last[worst])
                if choosy and flops[i] < lost * (now - before if before else patience):
                    for victim in reversed(victims):
                        order = orders[grades[victim]]
                        order[victim] = None
                        order.move_to_end(victim, last=False)
                    continue
                for victim in victims:
                    held[victim] = 0
                free = gained
            free -= size
            now += 1  # the policy's clock counts additions too
            last[i] = now
            held[i] = 1
            orders[grades[i]][i] = None
        return total
