"""Which machine gets which piece of work: longest processing time first (Graham 1969).

Costs and loads are in any one unit (tokens, seconds), >= 0 and finite; machines are alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def assign(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """The machine of each cost: longest first, each to the machine that would finish it first.

    ``loads`` is what every machine has to do already.  Ties go to the lowest index, of costs and of machines,
    so that the answer depends on the arguments alone.  On idle machines the last one finishes at most
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
    for piece in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable: ties by index
        load, machine = machines[0]
        found[piece] = machine
        heapq.heapreplace(machines, (load + costs[piece], machine))
    return found


def check_numbers(what: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < math.inf:  # NaN fails too
            raise ValueError(f"{what} {value!r}: expected a finite number >= 0")
