"""Linear layers for requests that decode with drafts: token by token, with each state in its own slot.

vLLM reserves one cache slot for every token that a request may decode in one pass.  A request continues from
the slot of its last accepted token.  On CPUs, vLLM's recurrence over several draft tokens changes answers.
This module makes one decode batch of the first tokens of all requests, one of the second tokens, and so on.
Stock code runs these batches like requests without drafts.  A slot holds the whole state after its token,
including the convolution's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .layout import LinearStep, StockRows, stock_rows


@dataclass(frozen=True)
class Drafted:
    """A batch in which requests decode with drafts, with the slots of one KV cache group.

    ``starts [requests + 1]``: first token rows; ``resumed [requests]``: whether a request has a state;
    ``slots [requests]``: slots of states, for requests that do not decode.  ``decoding``: batch rows of the
    requests that decode; ``behind [decoding, 1 + drafts]``: slots of the states after each of their tokens;
    ``before [decoding]``: slots of the states from which these requests continue.  Slots are int32.
    """

    starts: Sequence[int]
    resumed: Sequence[bool]
    slots: torch.Tensor
    decoding: Sequence[int]
    behind: torch.Tensor
    before: torch.Tensor

    @property
    def whole(self) -> StockRows:
        """The whole batch as a sub-batch of requests without drafts."""
        requests = len(self.resumed)
        rows = slice(0, self.starts[-1])
        return StockRows(0, rows, [*self.starts], [*range(requests)], [*map(int, self.resumed)])


@dataclass(frozen=True)
class DraftedPart:
    """Token rows that one call runs.

    ``moved``: source and target slots of the states that :meth:`move` copies before the call; ``metadata``:
    vLLM's metadata for these rows.
    """

    tokens: slice | torch.Tensor
    moved: tuple[torch.Tensor, torch.Tensor]
    metadata: Any

    def move(self, caches: Sequence[torch.Tensor]) -> None:
        """Copy the states in ``moved`` within each of a layer's ``caches``."""
        of, into = self.moved
        if len(of):
            for cache in caches:
                cache[into] = cache[of]


def special_part(
    drafted: Drafted, work: LinearStep, metadata_of: Callable[[StockRows, torch.Tensor], Any]
) -> DraftedPart:
    """Return a part with all rows, of which our operators run those in ``work.special``.

    A special request that decodes has no drafts; its state moves from the slot after its last token to its
    first slot."""
    here = [i for i, row in enumerate(drafted.decoding) if row in work.special]
    of, into = drafted.before[here], drafted.behind[here, 0]
    slots = drafted.slots.clone()
    slots[[drafted.decoding[i] for i in here]] = into
    elsewhere = of != into
    moved = of[elsewhere].long(), into[elsewhere].long()
    whole = drafted.whole
    return DraftedPart(whole.tokens, moved, metadata_of(whole, slots))


def parts(
    drafted: Drafted, work: LinearStep, metadata_of: Callable[[StockRows, torch.Tensor], Any]
) -> list[DraftedPart]:
    """Return the parts that stock code runs, in order.  ``metadata_of(rows, slots [requests])`` makes the
    metadata of a sub-batch."""
    nowhere = drafted.slots[:0].long()
    starts, decoding = drafted.starts, drafted.decoding
    found = []
    decoded = [i for i, row in enumerate(decoding) if row not in work.special]
    work = replace(work, special=work.special | frozenset(decoding))
    rest = stock_rows(work, starts, [*map(int, drafted.resumed)], 0)
    if rest is not None:
        found.append(
            DraftedPart(rest.tokens, (nowhere, nowhere), metadata_of(rest, drafted.slots[rest.batch_rows]))
        )
    lengths = {i: starts[decoding[i] + 1] - starts[decoding[i]] for i in decoded}
    for t in range(max(lengths.values(), default=0)):
        here = [i for i, length in lengths.items() if length > t]
        rows = [decoding[i] for i in here]
        tokens = torch.tensor([starts[row] + t for row in rows])
        of, into = (drafted.before if t == 0 else drafted.behind[:, t - 1])[here], drafted.behind[here, t]
        elsewhere = of != into
        moved = of[elsewhere].long(), into[elsewhere].long()
        batch = StockRows(len(here), tokens, [*range(len(here) + 1)], rows, [1] * len(here))
        found.append(DraftedPart(tokens, moved, metadata_of(batch, into)))
    return found
