"""A trace's lines replayed against one cache of prefix states, by a policy.

What is held is a tree of states.  An entry is one state and the K and V from the next held state before it
to its own depth, so that K and V behind the last state of a text, which nobody could resume from, take no
room. An entry with two or more children stays; one with a single child leaves it its K and V.  Only the
entry that a request resumes from counts as used.  These are Marconi's rules (arXiv 2411.19379, 4.3), and
what leaves first is :mod:`vllm_hypic.store.eviction.ranking`'s: ``alpha`` 0 is LRU.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hypic.store.eviction.ranking import Ranking, grade
from vllm_hypic.store.protocol import CacheValue

from .eviction_replay import Saved
from .eviction_shapes import RecordShape
from .prefix_lines import Line, Tree

ALPHAS = (0.0, 0.5, 1.0, 2.0)
TUNED_LINES = 500
FIRST_FACTOR = 5
"""Requests before the first tuning, over requests before the first eviction."""
MARGIN = 0.01
"""An alpha is taken if it gains this share over LRU: less may be chance."""
PASS = 8192
"""Tokens that vLLM computes in one pass; in ``align`` mode a pass ends with a state."""


@dataclass(frozen=True)
class Policy:
    """Where states are kept, all at multiples of ``grid``, and what leaves first.

    ``end``: of a request's answer; ``branch``: where a prompt leaves what was seen before; ``prompt_end``:
    at the prompt's last multiple; ``every``: at its multiples; and ``plans``, by line.  ``alpha`` None:
    tuned.
    """

    name: str
    grid: int
    alpha: float | None = 0.0
    branch: bool = True
    end: bool = True
    prompt_end: bool = False
    every: int = 0
    plans: Sequence[tuple[int, ...]] | None = None

    def wanted(self, number: int, line: Line, resumed: int) -> list[int]:
        """Depths at which this line leaves states, ascending: what it does not compute it cannot keep."""
        depths = set(self.plans[number]) if self.plans is not None else set()
        if self.end:
            depths.add(line.tokens)
        if self.branch:
            depths.add(line.shared)
        if self.prompt_end:
            depths.add(line.prompt)
        if self.every:
            depths.update(range(resumed // self.every * self.every, line.tokens, self.every))
        return sorted({d // self.grid * self.grid for d in depths if d // self.grid * self.grid > resumed})


@dataclass(eq=False)
class Entry:
    stretch: int
    depth: int
    parent: Entry | None
    children: set[Entry] = field(default_factory=set)
    key: str = ""


class PrefixCache:
    """States of one tree of texts, within ``budget`` bytes."""

    def __init__(self, tree: Tree, shape: RecordShape, budget: int) -> None:
        self._tree, self._shape, self._budget = tree, shape, budget
        self._ranking = Ranking()
        self._entries: dict[str, Entry] = {}
        self._depths: dict[int, list[int]] = {}  # of held states, by stretch
        self._root = Entry(-1, 0, None)
        self._now = 0
        self.used = 0
        self.evictions = 0
        self.states = 0
        """States kept in all."""

    def deepest(self, line: Line, limit: int) -> Entry:
        """The deepest state on the line's way, at most ``limit`` tokens deep."""
        for stretch, end in reversed(line.chain):
            depths = self._depths.get(stretch)
            at = bisect_right(depths, min(end, limit)) if depths else 0
            if depths and at:
                return self._entries[_key(stretch, depths[at - 1])]
        return self._root

    def touch(self, entry: Entry) -> None:
        if entry.parent is not None:
            self._now += 1
            self._ranking.touch(entry.key, self._now)

    def put(self, line: Line, depth: int, alpha: float, pinned: set[Entry]) -> bool:
        """Keep the state at this depth of the line, where room can be made beside what is pinned."""
        parent = self.deepest(line, depth)
        if parent.depth == depth:
            self.touch(parent)
            pinned.add(parent)
            return True
        stretch = next(stretch for stretch, end in line.chain if end >= depth)
        if self._shape.state_bytes + depth * self._shape.token_bytes > self._budget:
            return False
        while True:
            below = [c for c in parent.children if self._tree.passes(c.stretch, c.depth, stretch, depth)]
            # Children give up K and V that they had each for themselves.
            tokens = (depth - parent.depth) * (1 - len(below))
            need = self._shape.state_bytes + tokens * self._shape.token_bytes
            if self.used + need <= self._budget:
                break
            if not self._evict_one(alpha, pinned, parent):
                return False
        entry = Entry(stretch, depth, parent, set(below), _key(stretch, depth))
        self.states += 1
        parent.children.difference_update(below)
        parent.children.add(entry)
        self._entries[entry.key] = entry
        insort(self._depths.setdefault(stretch, []), depth)
        self.used += need
        self._now += 1
        self._ranking.put(entry.key, self._grade(entry), self._now)
        for child in below:
            child.parent = entry
            self._ranking.regrade(child.key, self._grade(child))
        pinned.add(entry)
        return True

    def _evict_one(self, alpha: float, pinned: set[Entry], parent: Entry) -> bool:
        for key in self._ranking.worst_first(self._now, alpha):
            entry = self._entries[key]
            if len(entry.children) <= 1 and entry not in pinned and entry is not parent:
                self._evict(entry)
                return True
        return False

    def _evict(self, entry: Entry) -> None:
        parent = entry.parent
        assert parent is not None
        self.evictions += 1
        parent.children.remove(entry)
        self._ranking.drop(entry.key)
        del self._entries[entry.key]
        depths = self._depths[entry.stretch]
        del depths[bisect_left(depths, entry.depth)]
        self.used -= self._shape.state_bytes
        for child in entry.children:
            child.parent = parent
            parent.children.add(child)
            self._ranking.regrade(child.key, self._grade(child))
        if not entry.children:
            self.used -= (entry.depth - parent.depth) * self._shape.token_bytes

    def _grade(self, entry: Entry) -> int:
        assert entry.parent is not None
        tokens, work = entry.depth - entry.parent.depth, self._shape.flops.prefill
        flops = work(entry.depth) - work(entry.parent.depth)
        nbytes = self._shape.state_bytes + tokens * self._shape.token_bytes
        return grade(CacheValue(tokens, flops, nbytes))

    def check_integrity(self) -> None:
        """Bytes and links agree with what is held."""
        nbytes = 0
        for entry in self._entries.values():
            assert entry.parent is not None and entry in entry.parent.children
            assert entry.parent is self._root or entry.parent.key in self._entries
            nbytes += self._shape.state_bytes + (entry.depth - entry.parent.depth) * self._shape.token_bytes
        assert nbytes == self.used <= self._budget, (nbytes, self.used, self._budget)
        assert sum(map(len, self._depths.values())) == len(self._entries) == len(self._ranking)


@dataclass(frozen=True)
class Outcome:
    """Of a replay: what was saved, the ``alpha`` in force at its end, and states kept in all."""

    saved: Saved
    alpha: float
    states: int


def replay(
    tree: Tree, shape: RecordShape, budget: int, policy: Policy, first: int = 0, last: int | None = None
) -> Outcome:
    """What the policy saves of lines ``first`` to ``last``, beginning with an empty cache."""
    cache = PrefixCache(tree, shape, budget)
    alpha = policy.alpha or 0.0
    tokens, flops, due = 0, 0.0, 0
    last = len(tree.lines) if last is None else last
    for number in range(first, last):
        line = tree.lines[number]
        if policy.alpha is None and due and number >= due:
            alpha, due = _tuned(tree, shape, budget, policy, number), 2 * number
        resumed = cache.deepest(line, line.prompt - 1)
        cache.touch(resumed)
        tokens += resumed.depth
        flops += shape.flops.prefill(resumed.depth)
        pinned = {resumed}
        for depth in policy.wanted(number, line, resumed.depth):
            if not cache.put(line, depth, alpha, pinned):
                break
        if not due and cache.evictions:
            due = (1 + FIRST_FACTOR) * (number + 1)
    cache.check_integrity()
    return Outcome(Saved(tokens, flops), alpha, cache.states)


def _tuned(tree: Tree, shape: RecordShape, budget: int, policy: Policy, upto: int) -> float:
    """The alpha that saves most of the last lines; LRU where none gains :data:`MARGIN` over it."""
    first = max(0, upto - TUNED_LINES)
    saved = {
        alpha: replay(tree, shape, budget, dataclasses.replace(policy, alpha=alpha), first, upto).saved.flops
        for alpha in ALPHAS
    }
    best = max(ALPHAS, key=saved.__getitem__)
    return best if saved[best] > saved[0.0] * (1 + MARGIN) else 0.0


def _key(stretch: int, depth: int) -> str:
    return f"{stretch}:{depth}"
