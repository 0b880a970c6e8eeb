"""The tokens of each request in a step of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def passes(scheduled: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """Yield the requests of a pass, each with the range ``[begin, end)`` of its tokens in the pass."""
    cached = scheduled.scheduled_cached_reqs
    begins = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    for request_id, begin in [*begins, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
        yield request_id, begin, begin + scheduled.num_scheduled_tokens[request_id]
