"""Explains a planned request: the parts of its prompt, the places of their records, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..cache_api.answers import Explanation, PromptPart, RecordPlace, Run
from ..connector.scheduler.connector import SchedulerConnector
from ..connector.scheduler.planning import PlanRequest
from ..primitives.keys import Role, SegmentKey
from ..primitives.plan import CachedSegment, PromptPlan
from ..primitives.tokens import PrimitiveIds


def explanation(
    request: PlanRequest,
    plan: PromptPlan | None,
    side: SchedulerConnector,
    *,
    prefix_cached: int,
    uncut: str | None,
) -> Explanation:
    """Return the explanation of a request as it would run now, without changing any state.

    ``prefix_cached``: tokens of the stream in vLLM's prefix cache.  ``uncut``: why no mode cuts this prompt.
    """
    ids = side.ids
    own = [i for i, token in enumerate(request.token_ids) if ids.marker(token) is None]
    segments = () if plan is None else plan.segments
    parts = list(_whole(request.token_ids, [_part(s, at, own, side) for s, at in _placed(segments)], ids))
    present = {part.key for part in parts if part.reused}
    reused = sum(s.reused for s in segments if side.namespace.renamed(s.key) in present)
    spec, reason = request.spec, None
    pieces = {} if spec.found is None else dict(spec.found.counts)
    if plan is not None and plan.warm_only:
        reason = "the prompt ends in a separator: the request only computes the records of its segments"
    elif not segments:
        if not spec.link.reuse:
            reason = f"link method {spec.link.name!r} reuses nothing"
        elif plan is not None or pieces.get("pieces"):
            reason = "no piece of the prompt is long enough for a record, or the pool is too small"
        elif uncut is not None:
            reason = uncut
        elif spec.segment_mode == "off":
            reason = "the prompt has no separators, and hypic_segment_mode is 'off'"
        else:
            reason = f"hypic_segment_mode={spec.segment_mode!r} finds no segments in the prompt"
    return Explanation(
        mode=spec.way,
        link=spec.link.name,
        pieces=pieces,
        prompt_tokens=len(request.token_ids),
        tokens_reused=reused,
        tokens_prefix_cached=prefix_cached,
        tokens_computed=len(own) - reused - prefix_cached,
        reason=reason,
        parts=parts,
    )


def _placed(segments: tuple[CachedSegment, ...]) -> Iterator[tuple[CachedSegment, int]]:
    """Yield each segment with its first token's index among the prompt's tokens that are no primitives."""
    reused = 0
    for segment in segments:
        first = segment.parts[0]
        yield segment, first.at + reused - first.first
        reused += segment.reused


def _part(segment: CachedSegment, at: int, own: list[int], side: SchedulerConnector) -> PromptPart:
    """Return the part for a segment whose first token is at prompt index ``own[at]``."""
    bounds = [(part.first, part.stop) for part in segment.parts if part.first < part.stop]
    runs: list[Run] = []
    done = 0
    for first, stop in [*bounds, (len(segment.tokens),) * 2]:
        for end, recomputed in ((first, True), (stop, False)):
            if end > done:
                start = runs[-1].stop if runs else own[at]  # padding belongs to the run that follows
                runs.append(Run(start, own[at + end - 1] + 1, recomputed))
                done = end
    renamed, context = side.namespace.renamed, segment.context
    key = renamed(segment.key)
    return PromptPart(
        "leading" if segment.role is Role.LEADING else "segment",
        runs,
        key,
        _place(key, side),
        None if context is None else renamed(context.key),
    )


def _place(key: SegmentKey, side: SchedulerConnector) -> RecordPlace:
    """Return the place of the record that users know by the key ``key``."""
    state = side.record_state(key)
    if state.resident or state.pending:
        return "resident" if state.resident else "pending"
    if state.stored:
        return "stored"
    return "unknown" if side.config.store.tiers else "absent"


def _whole(ids: list[int], segments: list[PromptPart], primitives: PrimitiveIds) -> Iterator[PromptPart]:
    """Yield the whole prompt in order: the ``segments`` and the primitives and stream tokens between them."""
    before = 0
    for segment in [*segments, None]:
        after = len(ids) if segment is None else segment.start
        between = groupby(range(before, after), lambda i: primitives.marker(ids[i]) is not None)
        for is_primitive, indices in between:
            first, *rest = indices
            run = Run(first, rest[-1] + 1 if rest else first + 1)
            yield PromptPart("primitive" if is_primitive else "stream", [run])
        if segment is not None:
            yield segment
            before = segment.stop
