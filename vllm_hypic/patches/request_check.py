"""Patch: the front end checks prompts with segments, and answers HTTP 400 for a bad prompt.  In prompts
without separators, the front end finds the segments.

Target: ``vllm.v1.engine.input_processor.InputProcessor.process_inputs``.
Why: the engine core has no way to refuse one request with a message.
Until: vLLM lets a plugin validate a request after tokenization.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch, which ignores engines without HypicConnector; repeated calls change nothing."""
    from vllm.v1.engine.input_processor import InputProcessor

    @replaces(InputProcessor, InputProcessor.process_inputs, "self", "request_id", "prompt", "params")
    def process_inputs(
        stock: Any, self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request = stock(self, request_id, prompt, *args, **kwargs)
        from ..engine.segments import SegmentFinder

        if not hasattr(self, "_hypic_finder"):
            self._hypic_finder = SegmentFinder(self.vllm_config)
        self._hypic_finder.receive(request, prompt)
        return request
