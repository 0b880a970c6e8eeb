"""Gives vLLM whole prompts of composed requests, for which a model runner's batch has only streams.

Logits processors read prompts.  Speculative decoding by n-grams and suffixes looks drafts up in a request's
own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate
from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch

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


@dataclass(frozen=True)
class WholePrompts:
    """The fields of vLLM's batch that proposers read, with whole prompts.
    ``token_ids_cpu [requests, tokens]`` has each prompt with its generated tokens, together
    ``num_tokens_no_spec`` tokens for each request."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    token_ids_cpu: np.ndarray
    num_tokens_no_spec: np.ndarray
    num_prompt_tokens: np.ndarray

    @staticmethod
    def of(batch: InputBatch, prompts: Sequence[np.ndarray | None]) -> WholePrompts:
        """Return ``batch``'s fields with whole prompts.
        ``prompts [requests]``: tokens of each whole prompt; ``None`` if the batch has the prompt itself."""
        ends, streams = batch.num_tokens_no_spec[: batch.num_reqs], batch.num_prompt_tokens[: batch.num_reqs]
        whole = [
            batch.token_ids_cpu[row, : streams[row]] if prompt is None else prompt
            for row, prompt in enumerate(prompts)
        ]
        known = np.array([len(prompt) for prompt in whole], dtype=streams.dtype)
        lengths = known + ends - streams
        tokens = np.zeros((len(whole), lengths.max()), dtype=batch.token_ids_cpu.dtype)
        for row, prompt in enumerate(whole):
            tokens[row, : known[row]] = prompt
            tokens[row, known[row] : lengths[row]] = batch.token_ids_cpu[row, streams[row] : ends[row]]
        return WholePrompts(batch.req_ids, batch.req_id_to_index, tokens, lengths, known)
