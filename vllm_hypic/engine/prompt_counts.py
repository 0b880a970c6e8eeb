"""Corrects vLLM's counts of prompts and cache hits, so that the counts agree with the requests' ``usage``.

vLLM counts the streams and segment requests that it schedules, without any hits in a connector's cache.
After the correction, a composed request counts once, with its prompt as sent; tokens from records are
external hits.  Segment requests do not count.  Plain requests count as in an engine without a connector,
or with only the connectors beside HypicConnector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats

from ..connector.scheduler.connector import SchedulerConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request


@dataclass
class _Prompt:
    """Counts of a planned request; ``sent``: tokens of the prompt as sent, primitives included."""

    sent: int
    hits: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that existing records held, by the source of the record."""
    recorded: int = 0
    """Prompt tokens of records that were computed for this request."""


class PromptCounts:
    """Corrects vLLM's statistics of planned requests.  ``alone``: HypicConnector is the only connector."""

    def __init__(self, side: SchedulerConnector, *, alone: bool) -> None:
        self._side, self._alone = side, alone
        self._prompts: dict[str, _Prompt] = {}
        """Planned requests by id, until vLLM reports their end."""
        self._local, self._external = PrefixCacheStats(), PrefixCacheStats()
        """Corrections to add to vLLM's counts of its own prefix cache, and of connectors' caches."""

    def expect(self, request_id: str, sent: int) -> None:
        """Note a planned request, whose prompt as sent has ``sent`` tokens."""
        self._prompts[request_id] = _Prompt(sent)

    def scheduled(
        self, output: SchedulerOutput, requests: Mapping[str, Request], looks_up: Callable[[Request], bool]
    ) -> None:
        """Record the corrections for a step that vLLM has just scheduled and counted.

        ``looks_up``: says whether vLLM looked a request up in its own prefix cache.
        """
        for request_id in output.finished_req_ids:
            self._prompts.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = self._prompts.get(new.req_id)
            if prompt is not None or self._side.is_internal(new.req_id):
                request = requests[new.req_id]
                self._begin(request, prompt, looked_up=looks_up(request))

    def _begin(self, request: Request, prompt: _Prompt | None, *, looked_up: bool) -> None:
        """Record corrections for a request that begins to run; ``prompt``: ``None`` for a segment request."""
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
        """Read the hits and computed tokens of a request whose records are resident into ``prompt``."""
        if (plan := self._side.plan_of(request_id)) is not None:
            prompt.hits = self._side.hits(request_id)
            prompt.recorded = sum(s.reused for s in plan.segments) - prompt.hits.total()

    def _ask_records(self, prompt: _Prompt, tokens: int) -> None:
        """Count ``tokens`` of the prompt as looked up in records, with the prompt's hits."""
        sources = {CacheHitSource(source): n for source, n in prompt.hits.items()}
        self._external.record(tokens, prompt.hits.total(), preempted=False, hits_by_source=sources)

    def end_unrun(self, request_id: str) -> PrefillStats | None:
        """Count a request that ends without running, because its records are resident.
        Returns the request's statistics, or ``None`` if the request was not planned."""
        if (prompt := self._prompts.get(request_id)) is None:
            return None
        self._look_at_records(request_id, prompt)
        self._ask_records(prompt, prompt.sent)
        stats = PrefillStats()
        stats.set(prompt.sent, 0, prompt.hits.total())
        stats.num_cache_creation_tokens = prompt.recorded
        return stats

    def prefilled(self, output: EngineCoreOutput) -> None:
        """Correct a planned request's first output in place; all other outputs stay unchanged."""
        stats, prompt = output.prefill_stats, self._prompts.get(output.request_id)
        if stats is None or prompt is None:
            return
        created, hits = stats.num_cache_creation_tokens + prompt.recorded, prompt.hits.total()
        stats.set(prompt.sent, stats.num_local_cached_tokens, stats.num_external_cached_tokens + hits)
        stats.num_cache_creation_tokens = created

    def correct(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        """Add the recorded corrections to vLLM's cache counts in a step's outputs."""
        for stats in [o.scheduler_stats for o in outputs if o.scheduler_stats is not None]:
            if (external := stats.connector_prefix_cache_stats) is not None:
                if self._alone:
                    external = PrefixCacheStats(reset=external.reset)
                stats.connector_prefix_cache_stats = _added(external, self._external)
            _added(stats.prefix_cache_stats, self._local)
            self._local, self._external = PrefixCacheStats(), PrefixCacheStats()


def _added(counts: PrefixCacheStats, more: PrefixCacheStats) -> PrefixCacheStats:
    """Add ``more`` to ``counts`` in place, and return ``counts``."""
    counts.requests += more.requests
    counts.queries += more.queries
    counts.hits += more.hits
    for source, hits in more.hits_by_source.items():
        counts.hits_by_source[source] = counts.hits_by_source.get(source, 0) + hits
    return counts
