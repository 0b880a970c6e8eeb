"""Speculative decoding that looks drafts up in a request's own tokens, by n-grams and suffixes.

vLLM's proposers read tokens from the model runner's batch, which has only a composed request's stream.  This
module gives the proposers the same fields of the batch, with whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch


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
