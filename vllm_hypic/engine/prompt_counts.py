"""What vLLM counts of prompts and of hits in its caches agrees with the ``usage`` of their requests.

vLLM counts what it schedules: streams, and segment requests, and no hits of either in a connector's cache.
Here a composed request counts once, with its prompt as it was sent and with what records had of it as
external hits.  Segment requests do not count; plain ones count as in an engine without a connector, or
with those beside ours alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats

from ..connector.scheduler.side import SchedulerSide

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request


@dataclass
class _Prompt:
    """A planned request; ``sent``: tokens of its prompt as it was sent, primitives included."""

    sent: int
    hits: Counter[str] = field(default_factory=Counter)
    """Tokens that records had of it, by where these came from."""
    recorded: int = 0
    """Tokens of records that were computed for it."""


class PromptCounts:
    """Corrects vLLM's statistics of planned requests.  ``alone``: no connector stands beside ours."""

    def __init__(self, side: SchedulerSide, *, alone: bool) -> None:
        self._side, self._alone = side, alone
        self._prompts: dict[str, _Prompt] = {}
        """Planned requests, until vLLM says that they have ended."""
        self._local, self._external = PrefixCacheStats(), PrefixCacheStats()
        """What is to be added to vLLM's counts of its own prefix cache, and of connectors' caches."""

    def expect(self, request_id: str, sent: int) -> None:
        """A request was planned, whose prompt had ``sent`` tokens as it was sent."""
        self._prompts[request_id] = _Prompt(sent)

    def scheduled(
        self, output: SchedulerOutput, requests: Mapping[str, Request], looks_up: Callable[[Request], bool]
    ) -> None:
        """vLLM has scheduled a step, and counted the prompts that begin in it.

        ``looks_up``: whether a request was looked for in vLLM's own prefix cache.
        """
        for request_id in output.finished_req_ids:
            self._prompts.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = self._prompts.get(new.req_id)
            if prompt is not None or self._side.is_internal(new.req_id):
                request = requests[new.req_id]
                self._begin(request, prompt, looked_up=looks_up(request))

    def _begin(self, request: Request, prompt: _Prompt | None, *, looked_up: bool) -> None:
        """A request begins to run; ``prompt``: ``None`` for a segment request."""
        assert request.prefill_stats is not None
        stream, cached = request.num_prompt_tokens, request.prefill_stats.num_local_cached_tokens
        if looked_up and prompt is not None and not request.get_skip_reading_prefix_cache():
            self._local.queries += prompt.sent - stream
        elif looked_up:
            self._local.requests -= 1
            self._local.queries -= stream
        if not self._alone:
            self._external.requests -= 1
            self._external.queries -= stream - cached
        if prompt is None:
            return
        self._look_at_records(request.request_id, prompt)
        if self._side.is_private(request.request_id):
            self._ask_records(prompt, prompt.sent - cached)
        elif not self._alone:
            self._external.record(prompt.sent - cached, 0, preempted=False)

    def _look_at_records(self, request_id: str, prompt: _Prompt) -> None:
        """The request's records are resident."""
        if (plan := self._side.plan_of(request_id)) is not None:
            prompt.hits = self._side.hits(request_id)
            prompt.recorded = sum(s.reused for s in plan.segments) - prompt.hits.total()

    def _ask_records(self, prompt: _Prompt, tokens: int) -> None:
        """So many of a prompt's tokens were looked for in records."""
        sources = {CacheHitSource(source): n for source, n in prompt.hits.items()}
        self._external.record(tokens, prompt.hits.total(), preempted=False, hits_by_source=sources)

    def end_unrun(self, request_id: str) -> PrefillStats | None:
        """Count a request that ends without having run, as its records are resident; its statistics.
        ``None``: it was not planned."""
        if (prompt := self._prompts.get(request_id)) is None:
            return None
        self._look_at_records(request_id, prompt)
        self._ask_records(prompt, prompt.sent)
        stats = PrefillStats()
        stats.set(prompt.sent, 0, prompt.hits.total())
        stats.num_cache_creation_tokens = prompt.recorded
        return stats

    def prefilled(self, output: EngineCoreOutput) -> None:
        """Correct the first output of a request; any other one stays as it is."""
        stats, prompt = output.prefill_stats, self._prompts.get(output.request_id)
        if stats is None or prompt is None:
            return
        created, hits = stats.num_cache_creation_tokens + prompt.recorded, prompt.hits.total()
        stats.set(prompt.sent, stats.num_local_cached_tokens, stats.num_external_cached_tokens + hits)
        stats.num_cache_creation_tokens = created

    def correct(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        """Correct vLLM's counts of its caches in a step's outputs."""
        for stats in [o.scheduler_stats for o in outputs if o.scheduler_stats is not None]:
            if (external := stats.connector_prefix_cache_stats) is not None:
                if self._alone:
                    external = PrefixCacheStats(reset=external.reset)
                stats.connector_prefix_cache_stats = _added(external, self._external)
            _added(stats.prefix_cache_stats, self._local)
            self._local, self._external = PrefixCacheStats(), PrefixCacheStats()


def _added(counts: PrefixCacheStats, more: PrefixCacheStats) -> PrefixCacheStats:
    """``counts``, to which ``more`` was added."""
    counts.requests += more.requests
    counts.queries += more.queries
    counts.hits += more.hits
    for source, hits in more.hits_by_source.items():
        counts.hits_by_source[source] = counts.hits_by_source.get(source, 0) + hits
    return counts
