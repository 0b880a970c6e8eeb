"""Assignment of work to machines: longest processing time first (LPT, Graham 1969).

Costs and loads share one unit (tokens or seconds), and are >= 0 and finite; all machines are equally fast.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def assign(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return the machine's index for each cost: the largest cost first, each to the least loaded machine.

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
