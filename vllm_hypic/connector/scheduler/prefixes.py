"""Prefixes: a prompt without segments captures its own prefix while it runs.

    tokens    [ checkpoint that is here | stretch 1 | stretch 2 | rest ] generated ...
    request     composed                  computed                       as ever

There is no request but the prompt's own: it goes on from the last checkpoint that is here, and what it
computes up to the end of its prefix becomes a record on the way, in stretches that end where checkpoints are
kept.  Each is there for others once a pass has gone beyond its end.  Passes may end anywhere.  Where the
record is here already the prompt is composed of it, and captures nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...primitives.plan import CachedSegment, PromptPlan
from ...primitives.prefix import behind
from .admission import Admission, ComposedRequest
from .continuations import Continuations
from .entries import Entry, Need
from .growing import GrowingDirectory
from .own_prefix import OwnPrefix, PrefixStretch
from .placement import PrefixPlacement


class Prefixes:
    """Gives requests their own prefixes to capture.

    ``need(segment, stop, behind)``: see :meth:`.Planner.need`; ``complete(segment, entry, base)`` is told of
    records that are.
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
        self._ends = Continuations(directory)

    def asked(self, segment: CachedSegment) -> None:
        """A prompt with this prefix has come."""
        self._ends.asked(segment)

    def begin(self, request_id: str, segment: CachedSegment, entry: Entry, priority: int) -> int:
        """Have a request, which has not run yet, capture the record of its prefix; how many tokens the
        checkpoint has from which it goes on.  ``priority``: that of the most urgent request that waits for
        the record."""
        request = self._admission.requests[request_id]
        request.own = own = self._own(request.plan, segment, entry)
        if own.base is not None:
            self._admission.hold(request, own.base)
        self._begun[request_id] = own.plan
        self._admission.urge(entry, priority)
        return own.first

    def _own(self, plan: PromptPlan, segment: CachedSegment, entry: Entry) -> OwnPrefix:
        """Behind the last checkpoint that is here; others get places, where they are to be kept and find
        room."""
        directory, kept = self._directory, self._placement.kept(segment, prompts_grow=self._ends.likely)
        at = base = None
        if (found := directory.deepest(segment.checkpoints, entry.base)) is not None:
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
        directory.weigh(entry, self._need(segment, segment.stop, first).worth)
        return own

    def take_begun(self) -> dict[str, PromptPlan]:
        """Requests that capture their own prefixes from now on, and what they run; since the last call."""
        begun, self._begun = self._begun, {}
        return begun

    def passed(self, request_id: str, end: int) -> None:
        """A pass of a request is over that ended before index ``end`` of its stream."""
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
        """A request is over, and has let its records go; places of what it did not complete for which others
        wait.  Where prompts do not go on from where others ended, its end leaves before its checkpoints."""
        self._begun.pop(request.request_id, None)
        if (own := request.own) is None:
            return []
        if own.entry.resident:
            self._ends.ended(own.entry.key)
            if not self._ends.likely:
                self._directory.supersede(own.entry)
        left = [stretch.target for stretch in own.ahead]
        self._directory.release(target for target in left if target not in request.held.values())
        return [target for target in left if self._directory.abort(target)]
