"""Prefixes: a prompt without segments captures its own prefix while it runs.

    tokens    [ checkpoint that is here | stretch 1 | stretch 2 | rest ] generated ...
    request     composed                  computed                       as usual

The prompt needs no segment request: it resumes from the last checkpoint in the pool.  Its own prefill fills
the record, in stretches that end at kept checkpoints.  Other requests find a stretch's checkpoint once a pass
has run beyond the stretch's end.  Passes may end anywhere.  If the pool has the record already, the prompt is
composed of the record and captures nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...primitives.plan import CachedSegment, PromptPlan
from ...primitives.prefix import behind
from .admission import Admission, ComposedRequest, OwnPrefix, PrefixStretch
from .entries import Entry, Need
from .growing import GrowingDirectory
from .placement import PrefixPlacement
from .reuse_estimator import ReuseEstimator


class Prefixes:
    """Lets requests capture their own prefixes.

    ``need(segment, stop, behind)``: see :meth:`.Planner.need`; ``complete(segment, entry, base)``: called for
    each complete record.
    """

    def __init__(
        self,
        directory: GrowingDirectory,
        admission: Admission,
        need: Callable[[CachedSegment, int, int], Need],
        placement: PrefixPlacement,
        complete: Callable[[CachedSegment, Entry, Entry | None], None],
    ) -> None:
        self._directory, self._admission, self._need, self._placement = directory, admission, need, placement
        self._complete = complete
        self._begun: dict[str, PromptPlan] = {}
        self._ends = ReuseEstimator(directory)

    def asked(self, segment: CachedSegment) -> None:
        """Note the arrival of a prompt with this prefix."""
        self._ends.observe(segment)

    def begin(self, request_id: str, segment: CachedSegment, entry: Entry, priority: int) -> int:
        """Let a request that has not run yet capture its prefix's record; return the number of tokens in the
        checkpoint that the request resumes from.  ``priority``: that of the most urgent request that waits
        for the record."""
        request = self._admission.requests[request_id]
        request.own = own = self._own(request.plan, segment, entry)
        if own.base is not None:
            self._admission.hold(request, own.base)
        self._begun[request_id] = own.plan
        self._admission.urge(entry, priority)
        return own.first

    def _own(self, plan: PromptPlan, segment: CachedSegment, entry: Entry) -> OwnPrefix:
        """Return the stretches behind the last checkpoint in the pool; reserve places for later checkpoints,
        as far as the placement keeps them and the pool has room."""
        directory = self._directory
        kept = self._placement.kept(segment, prompts_grow=self._ends.worth_keeping)
        at = base = None
        if (found := directory.deepest(segment.checkpoints, entry.resume_from)) is not None:
            at, base = found
            directory.resume(entry, base, can_be_deleted=False)
        own = OwnPrefix(entry, behind(plan, at), base, deque())
        first = own.first
        for checkpoint in segment.checkpoints:
            if checkpoint.stop <= first or checkpoint.stop not in kept:
                continue
            made = directory.checkpoint(checkpoint.key, entry, self._need(segment, checkpoint.stop, first))
            if made is not None:
                own.ahead.append(PrefixStretch(first, checkpoint.stop, made))
                first = checkpoint.stop
        own.ahead.append(PrefixStretch(first, segment.stop, entry))
        directory.weigh(entry, self._need(segment, segment.stop, first).eviction_value)
        return own

    def take_begun(self) -> dict[str, PromptPlan]:
        """Return requests that began to capture their prefixes since the last call, and their new plans."""
        begun, self._begun = self._begun, {}
        return begun

    def passed(self, request_id: str, end: int) -> None:
        """Complete the stretches filled by a finished pass that ended before stream index ``end``."""
        request = self._admission.requests.get(request_id)
        if request is None or (own := request.own) is None:
            return
        while own.ahead and own.ahead[0].stop - own.first <= end:
            done = own.ahead.popleft().target
            if done is own.entry:
                self._complete(request.segment(done.key), done, own.base)
            else:
                self._directory.commit(done)
                self._directory.release([done])

    def end(self, request: ComposedRequest) -> list[Entry]:
        """Free the incomplete places of a request that has ended and released its records; return the places
        for which other requests wait.  Where prompts rarely continue earlier ones, the whole record leaves
        before its checkpoints."""
        self._begun.pop(request.request_id, None)
        if (own := request.own) is None:
            return []
        if own.entry.resident:
            self._ends.add_end(own.entry.key)
            if not self._ends.worth_keeping:
                self._directory.supersede(own.entry)
        left = [stretch.target for stretch in own.ahead]
        self._directory.release(target for target in left if target not in request.held.values())
        return [target for target in left if self._directory.abort(target)]
