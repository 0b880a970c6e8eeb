"""Detection of requests whose sampling reads the prompt."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


def prompt_readers(vllm_config: VllmConfig) -> Callable[[SamplingParams], bool]:
    """Return a test whether sampling parameters make an engine read the prompt.  Repetition penalties and
    reasoning budgets do, and custom logits processors may."""
    if vllm_config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return lambda params: True
    return lambda params: params.repetition_penalty != 1.0 or params.thinking_token_budget is not None
