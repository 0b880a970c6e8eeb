"""Generated prefixes: capture the tokens behind a prompt's prefix while vLLM computes them.

    prompt     [ prefix: a record | rest ]
    answer                              generated ...
    captured                     [ page | page | ... | page ) no tokens behind the last whole page

The record gets a page when the first pass with a token of that page is scheduled.  The pass that ends a page
overwrites the states, so the record has one state, at the end of its last page.  When the request ends, the
record gets the key of its tokens, and lookups find it.  No request waits for a growing record: without room
it stops to grow, and a prompt that waits for room gets the record's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ...pool.plans import CapturePlan, Space
from ...primitives.plan import CachedSegment
from ...primitives.prefix import continued
from .admission import Admission, ComposedRequest
from .delta_records import DeltaRecords
from .entries import Entry, Need
from .growing import GrowingDirectory
from .placement import PrefixPlacement
from .reuse_estimator import ReuseEstimator

NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})
_MANY = 1 << 60
"""Stands for an unknown limit on generated tokens."""


@dataclass
class _OpenRecord:
    """The growing record ``entry`` of one request.  All other fields but ``grows`` are indices of the
    request's tokens in vLLM.  ``confirmed_end``, ``scheduled_end``: the last pass's end without and with its
    draft tokens.  ``last_page_end``: the last index at which a pass left states."""

    entry: Entry
    prefix_end: int
    confirmed_end: int
    scheduled_end: int
    last_page_end: int
    page_end: int
    grows: bool = True


class GeneratedPrefixes:
    """Grows records of prompts and answers while their requests run.

    ``need(tokens, behind)``: see :meth:`.Planner.need_grown`.  ``stored``: stores records in tiers; ``None``
    without tiers.  ``on``: false where the engine captures no answers.
    """

    def __init__(
        self,
        directory: GrowingDirectory,
        admission: Admission,
        need: Callable[[int, int], Need],
        placement: PrefixPlacement,
        stored: DeltaRecords | None,
        *,
        on: bool,
    ) -> None:
        self._directory, self._admission, self._need = directory, admission, need
        self._placement, self._stored, self._on = placement, stored, on
        self._answers: dict[str, _OpenRecord | None] = {}
        """Answers by request, once its prefix is computed; ``None``: the request's answer is not captured."""
        self._given_up: list[str] = []
        self._most: dict[str, int] = {}
        """The most tokens that each request may generate, by request id."""
        self._estimator = ReuseEstimator(directory)

    def expect(self, request_id: str, most: int) -> None:
        """Set the limit on tokens that the request may generate."""
        self._most[request_id] = most

    def scheduled(
        self, passes: Iterable[tuple[str, int, int]], drafts: Mapping[str, Sequence[int]] = NO_DRAFTS
    ) -> dict[str, tuple[CapturePlan, ...]]:
        """Return new capture plans by request for the coming pass; all other requests keep their plans.

        ``passes``: request ids and their token ranges ``[begin, end)``, which end in ``drafts``.
        """
        given_up, self._given_up = self._given_up, []
        alive = (request_id for request_id in given_up if request_id in self._answers)
        found = dict.fromkeys(alive, tuple[CapturePlan, ...]())
        for request_id, begin, end in passes if self._on else ():
            plans = self._scheduled(request_id, begin, end, len(drafts.get(request_id, ())))
            if plans is not None:
                found[request_id] = plans
        return found

    def _scheduled(
        self, request_id: str, begin: int, end: int, drafts: int
    ) -> tuple[CapturePlan, ...] | None:
        request = self._admission.requests.get(request_id)
        if request is None or not (request.plan.segments and request.plan.segments[0].is_prefix):
            return None
        if request_id not in self._answers:
            return self._begin(request, begin, end)
        answer = self._answers[request_id]
        if answer is None or not answer.grows:
            return None
        # Otherwise vLLM preempted the request and restarts it.
        if answer.confirmed_end <= begin <= answer.scheduled_end:
            return self._go_on(request, answer, begin, end, drafts)
        return self._drop(request_id, answer)

    def _begin(self, request: ComposedRequest, begin: int, end: int) -> tuple[CapturePlan, ...] | None:
        segment = request.plan.segments[0]
        prefix_end = segment.stop - _before(request)
        if end <= prefix_end:
            return None
        self._answers[request.request_id] = None
        self._estimator.observe(segment)
        if begin > prefix_end or request.outdated or not self._estimator.worth_keeping:
            return None
        computed = len(request.running.stream) + self._most.get(request.request_id, _MANY) - 1
        if (
            computed < prefix_end + self._directory.page_tokens
            or (entry := self._place(request, segment)) is None
        ):
            return None
        answer = _OpenRecord(entry, prefix_end, prefix_end, prefix_end, prefix_end, prefix_end)
        self._answers[request.request_id] = answer
        return self._go_on(request, answer, prefix_end, end, 0)

    def _place(self, request: ComposedRequest, segment: CachedSegment) -> Entry | None:
        record = request.held[segment.key]
        has_share = self._admission.within_share(record.tenant, self._directory.slots.space)
        return self._directory.reserve_open(record) if has_share and not record.forgotten else None

    def _grow(self, entry: Entry) -> bool:
        page = Space(self._directory.pages_for(self._directory.page_tokens))
        return self._admission.within_share(entry.tenant, page) and self._directory.extend(entry)

    def _go_on(
        self, request: ComposedRequest, answer: _OpenRecord, begin: int, end: int, drafts: int
    ) -> tuple[CapturePlan, ...] | None:
        """Extend the answer by one pass and return new capture plans; ``None``: the former plans stay."""
        begins = begin == answer.page_end
        page_end = answer.page_end + self._directory.page_tokens * begins
        if end + bool(drafts) > page_end or (begins and not self._grow(answer.entry)):
            # The pass overwrites the states at the page's end, or takes a draft's, or the pool has no room.
            answer.grows = False
            return ()
        answer.page_end, answer.confirmed_end, answer.scheduled_end = page_end, end - drafts, end
        if end == answer.page_end:
            answer.last_page_end = end
        return (self._plan(request, answer),) if begins else None

    def pass_end(self, request_id: str, begin: int, end: int) -> int:
        """Return the index, at most ``end``, at which a pass with drafts ends.  Such a pass ends no page, as
        the states of a draft could not be undone."""
        answer = self._answers.get(request_id)
        if answer is None or not answer.grows:
            return end
        page = self._directory.page_tokens
        last = begin - (begin - answer.prefix_end) % page + page - 1
        return min(end, max(begin + 1, last))

    def _plan(self, request: ComposedRequest, answer: _OpenRecord) -> CapturePlan:
        page, entry = self._directory.page_tokens, answer.entry
        first = entry.pages[-1] * page if entry.pages else 0
        return CapturePlan(
            lo=answer.page_end - page,
            hi=answer.page_end,
            slot=entry.slot,
            slot_mapping=np.arange(first, first + page, dtype=np.int64),
            positions=None,
            leading=True,
            serial=entry.serial,
            has_context=True,
            grows=True,
            offset=_before(request),
        )

    def end(self, request_id: str, tokens: Sequence[int] = ()) -> None:
        """List the answer's record, or free its place, when the request ends; call before it is forgotten.

        ``tokens``: all of the request's tokens in vLLM, generated tokens included; empty: keep no record.
        """
        self._most.pop(request_id, None)
        if request_id not in self._answers:
            return
        answer, request = self._answers.pop(request_id), self._admission.requests[request_id]
        segment, page = request.plan.segments[0], self._directory.page_tokens
        prefix_end, record = segment.stop - _before(request), request.held[segment.key]
        last = prefix_end + max(0, len(tokens) - 1 - prefix_end) // page * page
        stop = last if answer is None else answer.last_page_end
        grown = None
        if prefix_end < stop <= len(tokens) and not request.outdated:
            grown = continued(segment, tokens[prefix_end:stop], page)
            self._estimator.add_end(grown.key)
        if answer is None:
            return
        if grown is None or not record.resident or record.forgotten:
            self._directory.publish(answer.entry)
        elif self._directory.publish(answer.entry, grown.key, self._need(grown.stop, record.columns)):
            if request.own is not None:
                self._directory.supersede(record)
            self._placement.grown(grown)
            if self._stored is not None:
                self._stored.store(grown, answer.entry)

    def give_up(self, tenants: Collection[str] | None = None) -> None:
        """Free all growing records, or those of ``tenants``, as other requests wait for the room."""
        for request_id, answer in self._answers.items():
            if answer is not None and (tenants is None or answer.entry.tenant in tenants):
                self._drop(request_id, answer)
                self._given_up.append(request_id)

    def _drop(self, request_id: str, answer: _OpenRecord) -> tuple[CapturePlan, ...]:
        self._answers[request_id] = None
        self._directory.publish(answer.entry)
        return ()


def _before(request: ComposedRequest) -> int:
    """Return how many tokens of the prompt stand before the request's first token in vLLM."""
    plan = request.running
    return plan.n_logical - len(plan.stream)
