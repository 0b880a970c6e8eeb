"""Speculative decoding whose drafts are looked up in a request's own tokens: n-grams and suffixes.

vLLM's proposers read them in the model runner's batch, which has only the tokens of a composed request's
stream.  They are given what they read of the batch with the whole prompts in it.
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
    """What these proposers read of vLLM's batch: ``token_ids_cpu [requests, tokens]``, prompts and what was
    generated behind them, of which each request has ``num_tokens_no_spec``."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    token_ids_cpu: np.ndarray
    num_tokens_no_spec: np.ndarray
    num_prompt_tokens: np.ndarray

    @staticmethod
    def of(batch: InputBatch, prompts: Sequence[np.ndarray | None]) -> WholePrompts:
        """``prompts [requests]``: tokens of the whole prompt; ``None``: the batch has them."""
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
