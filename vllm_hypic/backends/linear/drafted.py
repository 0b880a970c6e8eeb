"""Requests that decode with drafts, as linear layers run them: token by token, each state in its own slot.

vLLM reserves a request a cache slot for every token that it may decode in one pass, and says behind which of
them it goes on: the last that was accepted.  With its own recurrence of several draft tokens on CPUs
answers are not those without drafts.  Here the first tokens of all requests are one decoding batch, then the
second ones, and so on: stock code runs them as it runs requests without drafts, and a slot holds all that is
behind its token, the convolution's inputs among it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .layout import LinearStep, StockRows, stock_rows


@dataclass(frozen=True)
class Drafted:
    """A batch in which requests decode with drafts, of one cache.

    ``starts [requests + 1]``: token rows; ``resumed [requests]``: they have a state; ``slots [requests]``:
    where it is, of those that do not decode.  ``decoding``: batch rows of those that do; ``behind [decoding,
    1 + drafts]``: slots of the states behind each of their tokens; ``before [decoding]``: of the state that
    they go on from.  Slots are int32.
    """

    starts: Sequence[int]
    resumed: Sequence[bool]
    slots: torch.Tensor
    decoding: Sequence[int]
    behind: torch.Tensor
    before: torch.Tensor

    @property
    def whole(self) -> StockRows:
        """The batch as if nobody had drafts."""
        requests = len(self.resumed)
        rows = slice(0, self.starts[-1])
        return StockRows(0, rows, [*self.starts], [*range(requests)], [*map(int, self.resumed)])


@dataclass(frozen=True)
class Part:
    """Token rows that stock code runs in one call.

    ``moved``: slots whose states are copied before, and where to; ``metadata``: vLLM's, of these rows.
    """

    tokens: slice | torch.Tensor
    moved: tuple[torch.Tensor, torch.Tensor]
    metadata: Any

    def move(self, caches: Sequence[torch.Tensor]) -> None:
        """Copy states in a layer's ``caches``."""
        of, into = self.moved
        if len(of):
            for cache in caches:
                cache[into] = cache[of]


def special_part(
    drafted: Drafted, work: LinearStep, metadata_of: Callable[[StockRows, torch.Tensor], Any]
) -> Part:
    """All rows, of which our operators run the special ones.  Who decodes among these has no drafts, and goes
    from the state behind its last token into the first of its slots."""
    here = [i for i, row in enumerate(drafted.decoding) if row in work.special]
    of, into = drafted.before[here], drafted.behind[here, 0]
    slots = drafted.slots.clone()
    slots[[drafted.decoding[i] for i in here]] = into
    elsewhere = of != into
    moved = of[elsewhere].long(), into[elsewhere].long()
    whole = drafted.whole
    return Part(whole.tokens, moved, metadata_of(whole, slots))


def parts(
    drafted: Drafted, work: LinearStep, metadata_of: Callable[[StockRows, torch.Tensor], Any]
) -> list[Part]:
    """All rows that stock code runs, in order.  ``metadata_of(rows, slots [requests])``: of a sub-batch."""
    nowhere = drafted.slots[:0].long()
    starts, decoding = drafted.starts, drafted.decoding
    found = []
    decoded = [i for i, row in enumerate(decoding) if row not in work.special]
    work = replace(work, special=work.special | frozenset(decoding))
    rest = stock_rows(work, starts, [*map(int, drafted.resumed)], 0)
    if rest is not None:
        found.append(Part(rest.tokens, (nowhere, nowhere), metadata_of(rest, drafted.slots[rest.batch_rows])))
    lengths = {i: starts[decoding[i] + 1] - starts[decoding[i]] for i in decoded}
    for t in range(max(lengths.values(), default=0)):
        here = [i for i, length in lengths.items() if length > t]
        rows = [decoding[i] for i in here]
        tokens = torch.tensor([starts[row] + t for row in rows])
        of, into = (drafted.before if t == 0 else drafted.behind[:, t - 1])[here], drafted.behind[here, t]
        elsewhere = of != into
        moved = of[elsewhere].long(), into[elsewhere].long()
        batch = StockRows(len(here), tokens, [*range(len(here) + 1)], rows, [1] * len(here))
        found.append(Part(tokens, moved, metadata_of(batch, into)))
    return found
