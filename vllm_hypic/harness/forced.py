"""Answers that are given instead of chosen, to measure the likelihood of a text.

The engine's process loads this logits processor of vLLM by name (``LLM(logits_processors=[...])``).
vLLM takes logprobs before processors change logits, and always reports the logprob of the chosen token.  A
single request thus gives the likelihood of every token of a text, behind all tokens before it.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from .engine_calls import FORCED_TOKENS


class ForcedTokens(AdapterLogitsProcessor):
    """Makes a request answer with the ids in its extra argument ``forced_tokens``; ignores other requests."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        tokens: list[int] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if tokens is None:
            return None

        def force(answered: list[int], logits: torch.Tensor) -> torch.Tensor:
            """Force the next token; only the length of ``answered`` counts, as ids may not be known yet."""
            logits.fill_(float("-inf"))
            logits[tokens[len(answered)]] = 0.0
            return logits

        return force
