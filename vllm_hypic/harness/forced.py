"""Answers that are given instead of chosen, so that a model can be asked how likely a text is.

A logits processor of vLLM (``LLM(logits_processors=[...])``), loaded by its name in the engine's process.
vLLM takes logprobs before processors change anything, and always reports that of the token which was taken:
one request tells how likely every token of a text is, behind everything before it.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from .engine_calls import FORCED_TOKENS


class ForcedTokens(AdapterLogitsProcessor):
    """Makes a request answer with the ids in its extra argument ``forced_tokens``; leaves others alone."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        tokens: list[int] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if tokens is None:
            return None

        def force(answered: list[int], logits: torch.Tensor) -> torch.Tensor:
            """``answered`` counts the tokens before this one; their ids may not be known yet."""
            logits.fill_(float("-inf"))
            logits[tokens[len(answered)]] = 0.0
            return logits

        return force
