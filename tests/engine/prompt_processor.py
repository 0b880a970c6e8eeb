"""A logits processor that reads prompts; loaded by its name in an engine's process."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

NAME = "engine.prompt_processor:FavouredWords"
FAVOUR = "favour"


class FavouredWords(AdapterLogitsProcessor):
    """Adds the extra argument ``favour`` to a token's logit each time that it stands in the prompt, and takes
    it off where the answer has it already."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        favour = (params.extra_args or {}).get(FAVOUR)
        if favour is None:
            return None

        def change(prompt: list[int], answered: list[int], logits: torch.Tensor) -> torch.Tensor:
            for tokens, sign in ((prompt, 1), (answered, -1)):
                counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits))
                logits += sign * favour * counts
            return logits

        return change
