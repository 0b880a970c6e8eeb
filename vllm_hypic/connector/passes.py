"""Requests in a step of vLLM's scheduler: their tokens, and whether sampling reads their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput


def passes(scheduled: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """Yield the requests of a pass, each with the range ``[begin, end)`` of its tokens in the pass."""
    cached = scheduled.scheduled_cached_reqs
    begins = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    for request_id, begin in [*begins, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
        yield request_id, begin, begin + scheduled.num_scheduled_tokens[request_id]


def prompt_readers(vllm_config: VllmConfig) -> Callable[[SamplingParams], bool]:
    """Return a test whether sampling parameters make an engine read the prompt.  Repetition penalties and
    reasoning budgets do, and custom logits processors may."""
    if vllm_config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return lambda params: True
    return lambda params: params.repetition_penalty != 1.0 or params.thinking_token_budget is not None
