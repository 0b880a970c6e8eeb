"""A trace as paths in one tree of texts, and what follows from it whatever a cache does.

A *stretch* is what one id stands for behind one text.  A prompt is a chain of stretches, each up to some
depth; depths are tokens from the prompt's begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hypic.store.placement.depths import Depths, Placer
from vllm_hypic.store.placement.optimal import OptimalPlacer
from vllm_hypic.store.placement.planner import CheckpointPlanner

from .eviction_shapes import RecordShape
from .prefix_traces import Turn

GRID = 64
"""Tokens between places for states: what kernels of linear layers compute at once."""
Chain = tuple[tuple[int, int], ...]
"""Stretches from the begin, each with the depth up to which it goes."""


@dataclass(frozen=True)
class Line:
    """A request: its prompt's tokens, prompt and answer as a chain, and ``shared``: how many tokens of the
    prompt some request before had, too, ``former`` being the last (-1: none); ``interior``: none of them
    ended there."""

    prompt: int
    chain: Chain
    shared: int
    former: int
    interior: bool

    @property
    def tokens(self) -> int:
        return self.chain[-1][1]


@dataclass(frozen=True)
class Tree:
    """All lines; parent and first depth of each stretch; of each reuse the tokens, requests since the last
    one and depth: ``[reuses, 4]`` float64, columns depth before, depth, gap before, gap."""

    lines: tuple[Line, ...]
    parents: Sequence[int]
    begins: Sequence[int]
    levels: Sequence[int]
    reuses: np.ndarray

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Tree:
        return _Builder().built(turns)

    def passes(self, stretch: int, depth: int, by: int, at: int) -> bool:
        """Whether the way to ``depth`` of ``stretch`` leads by depth ``at`` of ``by``."""
        while self.levels[stretch] > self.levels[by]:
            stretch, depth = self.parents[stretch], self.begins[stretch]
        return stretch == by and depth >= at

    def footprint(self, shape: RecordShape) -> int:
        """K and V of all texts, and a state at the end of each request and wherever one left another."""
        ends = {line.chain[-1]: None for line in self.lines}
        forks = sum(line.interior for line in self.lines)
        longest: dict[int, int] = {}
        for line in self.lines:
            for stretch, end in line.chain:
                longest[stretch] = max(end, longest.get(stretch, 0))
        tokens = sum(end - self.begins[stretch] for stretch, end in longest.items())
        return tokens * shape.token_bytes + (len(ends) + forks) * shape.state_bytes

    def bound(self, shape: RecordShape, budget: int) -> float:
        """FLOPs that no cache of this size can exceed, whatever it knows and wherever it keeps states.

        A token that is not computed again needs its K and V from the last request that had it to this one,
        and the request one state, from the last request that passed there.  All together have ``budget``
        bytes times the requests; the best parts fill that, the last one in part (fractional knapsack).
        """
        before, depth, gap_before, gap = self.reuses.T
        work = np.vectorize(shape.flops.prefill, otypes=[float])
        flops = work(depth) - work(before)
        cost = (depth - before) * gap * shape.token_bytes + (gap - gap_before) * shape.state_bytes
        order = np.argsort(-flops / cost)
        room = float(budget) * max(0, len(self.lines) - 1)
        ahead = np.cumsum(cost[order]) - cost[order]
        return float(np.clip((room - ahead) / cost[order], 0.0, 1.0) @ flops[order])


class _Builder:
    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int, str], int] = {}
        self.parents: list[int] = []
        self.begins: list[int] = []
        self.levels: list[int] = []
        self.reached: list[list[tuple[int, int]]] = []
        """Of a stretch, deepest last: depth, and the last request that went so far."""

    def built(self, turns: Iterable[Turn]) -> Tree:
        lines: list[Line] = []
        ends: set[tuple[int, int]] = set()
        rows: list[tuple[int, int, int, int]] = []
        for at, turn in enumerate(turns):
            chain = self.chain(turn)
            left, shared, gap_before, former = (-1, 0), 0, 0, -1
            for stretch, depth, used in self.former(chain, turn.prompt):
                rows.append((shared, depth, gap_before, at - used))
                left, shared, gap_before, former = (stretch, depth), depth, at - used, used
            lines.append(Line(turn.prompt, chain, shared, former, shared > 0 and left not in ends))
            ends.add(chain[-1])
            for stretch, end in chain:
                reached = self.reached[stretch]
                deeper = [(depth, used) for depth, used in reached if depth > end]
                self.reached[stretch] = [(end, at), *deeper]
        reuses = np.array(rows, dtype=np.float64).reshape(-1, 4)
        return Tree(tuple(lines), self.parents, self.begins, self.levels, reuses)

    def chain(self, turn: Turn) -> Chain:
        found: list[tuple[int, int]] = []
        parent, depth = -1, 0
        for piece in turn.pieces:
            key = (parent, depth, piece.id if found else f"{turn.salt}/{piece.id}")
            number = self.numbers.setdefault(key, len(self.parents))
            if number == len(self.parents):
                self.parents.append(parent)
                self.begins.append(depth)
                self.levels.append(len(found))
                self.reached.append([])
            depth += piece.tokens
            found.append((number, depth))
            parent = number
        return tuple(found)

    def former(self, chain: Chain, prompt: int) -> Iterator[tuple[int, int, int]]:
        """What former requests had of the prompt: stretch, depth, and the last request that went so far."""
        for stretch, end in chain:
            upto = self.begins[stretch]
            for depth, used in self.reached[stretch]:
                depth = min(depth, end, prompt)
                if depth > upto:
                    yield stretch, depth, used
                    upto = depth
            if upto < end:
                return


Plans = list[tuple[int, ...]]
"""For every line, the depths at which it keeps states besides that of its end."""


def planned(
    tree: Tree,
    shape: RecordShape,
    placer: Placer,
    states: int,
    *,
    ends_kept: bool = True,
    thrifty: bool = False,
    alone: bool = False,
) -> Plans:
    """What the engine's planner says of each line, by what requests before it shared.  ``alone``: of whole
    lines, as if each were the only one in the cache."""
    planner = CheckpointPlanner(
        GRID,
        state_bytes=shape.state_bytes,
        token_bytes=shape.token_bytes,
        budget_bytes=states * shape.state_bytes,
        work=shape.flops.prefill,
        placer=placer,
        ends_kept=ends_kept,
        thrifty=thrifty,
    )
    found = []
    for line in tree.lines:
        if line.shared:
            planner.observe(line.shared, tree.lines[line.former].tokens if line.interior else line.shared)
        found.append(planner.boundaries(line.tokens, 0 if alone else line.shared))
    return found


def foreseen(tree: Tree, shape: RecordShape, states: int) -> Plans:
    """The best states of each line alone, for those who will share it."""
    future: list[dict[int, int]] = [{} for _ in tree.lines]
    for line in tree.lines:
        if line.interior:
            at = line.shared // GRID
            future[line.former][at] = future[line.former].get(at, 0) + 1
    found = []
    for counts in future:
        weights = np.zeros(max(counts, default=0) + 1)
        weights[list(counts)] = list(counts.values())
        work = np.array([shape.flops.prefill(GRID * d) for d in range(len(weights))])
        best = OptimalPlacer().place(Depths(weights, work), states).boundaries
        found.append(tuple(GRID * b for b in best))
    return found


def kept(tree: Tree, shape: RecordShape, plans: Plans) -> float:
    """Of the work up to where requests leave the last line that they share, the part that its states save."""
    work, saved, asked = shape.flops.prefill, 0.0, 0.0
    for line in tree.lines:
        if line.interior:
            at = max((d for d in plans[line.former] if d <= line.shared), default=0)
            saved, asked = saved + work(at), asked + work(line.shared)
    return saved / asked if asked else 0.0
