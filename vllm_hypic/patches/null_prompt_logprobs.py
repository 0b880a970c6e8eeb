"""Patch: prompt logprobs are null for tokens without computed logprobs.

Target: ``vllm.v1.engine.logprobs.LogprobsProcessor._update_prompt_logprobs``.
Why: vLLM knows only one token without logprobs, the first, and takes a row from the engine for every other
token.  A token behind a token read from a record has a row of rank :data:`NO_RANK`
(``engine/prompt_logprobs.py``), which stock engines never give.
Until: vLLM returns prompt logprobs of requests that read a part of their prompt from a cache.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces

NO_RANK = -1
"""The rank of a prompt token whose logprobs were not computed."""


def apply() -> None:
    """Apply the patch, which changes only answers with such rows; repeated calls change nothing."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor as Processor

    @replaces(Processor, Processor._update_prompt_logprobs, "self", "prompt_logprobs_tensors")
    def update(stock: Any, self: Processor, prompt_logprobs_tensors: Any) -> None:
        begin = len(self.prompt_logprobs or ())
        # The stock code needs all rows: earlier tokens help to spell a token that ends inside a character.
        stock(self, prompt_logprobs_tensors)
        ranks = prompt_logprobs_tensors.selected_token_ranks
        nulls = {begin + row for row in (ranks == NO_RANK).nonzero().flatten().tolist()}
        if not nulls:
            return
        entries = self.prompt_logprobs
        assert entries is not None
        kept = [None if i in nulls else entry for i, entry in enumerate(entries)]
        if isinstance(entries, FlatLogprobs):
            self.prompt_logprobs = FlatLogprobs()
            self.prompt_logprobs.extend(kept)
        else:
            self.prompt_logprobs = kept
