"""What a step of vLLM's scheduler says of each request's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def passes(scheduled: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """The requests of a pass, and the range ``[begin, end)`` of their tokens that it runs."""
    cached = scheduled.scheduled_cached_reqs
    begins = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    for request_id, begin in [*begins, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
        yield request_id, begin, begin + scheduled.num_scheduled_tokens[request_id]
