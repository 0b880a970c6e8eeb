"""What logits processors are told of requests: prompts whole, where the batch has private streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate
from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder

PromptsOfLists = Callable[[], Mapping[int, np.ndarray]]
"""Tokens of whole prompts, by the ``id()`` of the list of tokens that the batch has instead."""


class PromptTellingBuilder(BatchUpdateBuilder):
    """vLLM's, in a model runner's batch; in its place from the first step on."""

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
