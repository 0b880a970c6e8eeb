"""A composed prompt of a dense model, emulated with transformers: to try a choice of rows before it is built.

Records are computed behind a context, K is rotated to where they stand, chosen rows are computed once more
with everything before them visible.  One prompt at a time, no paging: nothing here is fast, or bit for bit
the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vllm_hypic.eval.task import Prompt
from vllm_hypic.tune.dense import Columns, Dense, joined


@torch.inference_mode()
def columns_of(model: Dense, ids: Sequence[int], first: int = 0, seen: Columns | None = None) -> Columns:
    """Of tokens at positions ``first`` and on."""
    return model.run(torch.tensor([list(ids)]), torch.arange(first, first + len(ids)), seen)[1]


class Composed:
    """One prompt: full recompute, and records with some rows computed again."""

    def __init__(self, model: Dense, prompt: Prompt, context: Columns | None) -> None:
        """``context``: what records see while they are computed, from position 0 on."""
        self._model, self.prompt, self._context = model, prompt, context
        self.bounds = tuple(pairwise(accumulate(map(len, prompt.documents), initial=len(prompt.head))))
        """First and last + 1 position of every segment."""
        self.end = self.bounds[-1][1]
        self._ids = [*prompt.head, *(t for s in prompt.documents for t in s)]

    @cached_property
    def full(self) -> Columns:
        return columns_of(self._model, self._ids)

    @cached_property
    def records(self) -> Columns:
        n = 0 if self._context is None else len(self._context.positions)
        parts = [columns_of(self._model, self.prompt.head)]
        for document, (first, _) in zip(self.prompt.documents, self.bounds, strict=True):
            columns = columns_of(self._model, document, n, self._context)
            parts.append(self._model.moved(columns, first - n))
        return joined(parts)

    @cached_property
    @torch.inference_mode()
    def draws(self) -> Tensor:
        """What every position of records draws of the question's attention (ProphetKV's criterion)."""
        question = torch.tensor([self.prompt.question])
        rows = torch.arange(self.end, self.end + question.shape[1])
        drawn = self._model.run(question, rows, self.records, draws=True)[2]
        assert drawn is not None
        return drawn[: self.end]

    @cached_property
    def deviation(self) -> Tensor:
        """How far V of every position is from full recompute's in two early layers (CacheBlend's)."""
        difference = (self.records.values[1:3].float() - self.full.values[1:3].float()).pow(2)
        return difference.sum((0, 1, 2, 4))

    @torch.inference_mode()
    def answer(
        self, rows: Sequence[int] | None, tokens: int, end: int | None = None
    ) -> tuple[Tensor, list[int]]:
        """Scores of the first token, and at most ``tokens`` tokens, greedy, up to ``end``; ``rows``: as of
        :meth:`_asked`."""
        first, columns = self._asked(rows)
        found = [int(first.argmax())]
        while len(found) < tokens and found[-1] != end:
            scores, new = self._after(columns, found[-1:])
            columns = joined([columns, new])
            found.append(int(scores[-1].argmax()))
        return first, found

    @torch.inference_mode()
    def likelihood(self, rows: Sequence[int] | None, continuation: Sequence[int]) -> tuple[Tensor, float]:
        """Scores of the first token, and nats a token of what follows; ``rows``: as of :meth:`_asked`."""
        first, columns = self._asked(rows)
        scores = torch.cat([first[None], self._after(columns, continuation[:-1])[0]])
        return first, float(torch.nn.functional.cross_entropy(scores, torch.tensor(continuation)))

    def _asked(self, rows: Sequence[int] | None) -> tuple[Tensor, Columns]:
        """Scores of the first token, and all columns before it; ``rows`` of records computed again, all
        positions of segments; ``None``: full recompute."""
        question = range(self.end, self.end + len(self.prompt.question))
        if rows is None:
            columns, again = self.full, list[int]()
        else:
            again = sorted(rows)
            keep = torch.ones(self.end, dtype=torch.bool)
            keep[again] = False
            at, records = keep.nonzero()[:, 0], self.records
            columns = Columns(records.keys[:, :, :, at], records.values[:, :, :, at], records.positions[at])
        ids = [*(self._ids[p] for p in again), *self.prompt.question]
        scores, new, _ = self._model.run(torch.tensor([ids]), torch.tensor([*again, *question]), columns)
        return scores[0, -1], joined([columns, new])

    def _after(self, columns: Columns, ids: Sequence[int]) -> tuple[Tensor, Columns]:
        """Scores ``[tokens, vocabulary]`` and columns of tokens at the end."""
        first = len(columns.positions)
        positions = torch.arange(first, first + len(ids))
        scores, new, _ = self._model.run(torch.tensor([list(ids)]), positions, columns, keep=len(ids))
        return scores[0], new
