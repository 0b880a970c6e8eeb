"""A composed prompt of a dense model, emulated with transformers: to try a choice of rows before it is built.

Records are computed behind a context, K is rotated to where they stand, chosen rows are computed once more
with everything before them visible.  One prompt at a time, no paging: nothing here is fast, or bit for bit
the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from vllm_hypic.harness.prompts import Prompt

LOWEST = torch.finfo(torch.bfloat16).min


@dataclass(frozen=True)
class Columns:
    """Rotated K and V [layers, heads, columns, dim], and the position of each column."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def where(self, index: Tensor) -> Columns:
        return Columns(self.keys[:, :, index], self.values[:, :, index], self.positions[index])


def joined(parts: Sequence[Columns]) -> Columns:
    return Columns(
        torch.cat([p.keys for p in parts], 2),
        torch.cat([p.values for p in parts], 2),
        torch.cat([p.positions for p in parts]),
    )


class Dense:
    """A checkpoint with plain RoPE and full attention in every layer; raises ``ValueError`` for others."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = self._model.config
        parameters = config.rope_parameters
        if parameters.get("rope_type") != "default" or getattr(config, "sliding_window", None):
            raise ValueError(f"{folder}: expected full attention with plain RoPE, found {config}")
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._turns = parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)

    @torch.inference_mode()
    def run(
        self, ids: Sequence[int], positions: Sequence[int], seen: Columns | None, *, weights: bool = False
    ) -> tuple[Tensor, Columns, Tensor | None]:
        """Rows ``ids`` over ``seen`` and each other; a row sees what stands at or before its position.

        Returns scores of the last row [vocabulary] in float32, the rows' columns and, if asked for, what each
        of all columns draws [columns]: attention weights, mean over layers, heads and rows.
        """
        at = torch.tensor(positions)
        cache = DynamicCache()
        before = torch.zeros(0, dtype=torch.long) if seen is None else seen.positions
        if seen is not None:
            for layer, (k, v) in enumerate(zip(seen.keys, seen.values, strict=True)):
                cache.update(k[None], v[None], layer)
        visible = torch.cat([before, at])[None] <= at[:, None]
        mask = torch.zeros(visible.shape, dtype=self._dtype)[None, None].masked_fill_(~visible, LOWEST)
        self._model.set_attn_implementation("eager" if weights else "sdpa")
        out = self._model(
            input_ids=torch.tensor([list(ids)]),
            position_ids=at[None],
            attention_mask=mask,
            past_key_values=cache,
            logits_to_keep=1,
            output_attentions=weights,
        )
        new = slice(len(before), None)
        columns = Columns(
            torch.stack([layer.keys[0, :, new] for layer in cache.layers]),
            torch.stack([layer.values[0, :, new] for layer in cache.layers]),
            at,
        )
        drawn = [a[0].float().mean((0, 1)) for a in out.attentions] if weights else None
        return out.logits[0, -1].float(), columns, None if drawn is None else torch.stack(drawn).mean(0)

    def moved(self, columns: Columns, by: int) -> Columns:
        """Rotated by ``by`` more positions."""
        angles = (by * self._turns).repeat(2)
        low, high = columns.keys.float().chunk(2, -1)
        keys = columns.keys * angles.cos() + torch.cat([-high, low], -1) * angles.sin()
        return Columns(keys.to(self._dtype), columns.values, columns.positions + by)


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
    def _head(self) -> Columns:
        return self._model.run(self.prompt.head, range(len(self.prompt.head)), None)[1]

    @cached_property
    def full(self) -> Columns:
        return self._model.run(self._ids, range(self.end), None)[1]

    @cached_property
    def records(self) -> Columns:
        n = 0 if self._context is None else len(self._context.positions)
        parts = [self._head]
        for document, (first, _) in zip(self.prompt.documents, self.bounds, strict=True):
            columns = self._model.run(document, range(n, n + len(document)), self._context)[1]
            parts.append(self._model.moved(columns, first - n))
        return joined(parts)

    @cached_property
    def draws(self) -> Tensor:
        """What every position of records draws of the query's attention (ProphetKV's criterion)."""
        rows = range(self.end, self.end + len(self.prompt.question))
        drawn = self._model.run(self.prompt.question, rows, self.records, weights=True)[2]
        assert drawn is not None
        return drawn[: self.end]

    @cached_property
    def deviation(self) -> Tensor:
        """How far V of every position is from full recompute's in the second and third layer (CacheBlend's)."""
        difference = (self.records.values[1:3].float() - self.full.values[1:3].float()).pow(2)
        return difference.sum((0, 1, 3))

    def answer(self, rows: Sequence[int] | None, tokens: int) -> tuple[Tensor, list[int]]:
        """Scores of the first token, and ``tokens`` tokens, greedy; ``rows`` of records computed again, all
        positions of segments; ``None``: full recompute."""
        question = range(self.end, self.end + len(self.prompt.question))
        if rows is None:
            columns, again = self.full, list[int]()
        else:
            again = sorted(rows)
            keep = torch.ones(self.end, dtype=torch.bool)
            keep[again] = False
            columns = self.records.where(keep.nonzero()[:, 0])
        ids = [*(self._ids[p] for p in again), *self.prompt.question]
        scores, new, _ = self._model.run(ids, [*again, *question], columns)
        first, found = scores, [int(scores.argmax())]
        while len(found) < tokens:
            columns = joined([columns, new])
            scores, new, _ = self._model.run(found[-1:], [question.stop + len(found) - 1], columns)
            found.append(int(scores.argmax()))
        return first, found
