"""Tells logits processors the whole prompts of requests for which the batch has only streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate
from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder

PromptsOfLists = Callable[[], Mapping[int, np.ndarray]]
"""Returns the tokens of whole prompts, by the ``id()`` of the token list in the batch."""


class PromptTellingBuilder(BatchUpdateBuilder):
    """Replaces vLLM's builder in a model runner's batch, from the first step on."""

    added: list[AddedRequest]

    def __init__(self, stock: BatchUpdateBuilder, whole: PromptsOfLists) -> None:
        super().__init__(stock._removed, stock.added, stock.moved)
        self.batch_changed = stock.batch_changed
        self._whole = whole

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        if self.added and (whole := self._whole()):
            self.added = [
                (index, params, whole[id(tokens)].tolist() if id(tokens) in whole else tokens, generated)
                for index, params, tokens, generated in self.added
            ]
        return super().get_and_reset(batch_size)
