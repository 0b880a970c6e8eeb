"""Build the :class:`PromptPlan` of a prompt: the description of a PIC request for all parts of an engine.

A prompt ``lead SEP doc1 SEP doc2 SEP query`` becomes a *stream* of the tokens that must be
computed, in logical order,

    [head of doc1] | [tail of doc1][head of doc2] | [tail of doc2][query]

and, at each ``|``, a *compose point* that applies a cached segment's interior.  An *island*, a window
inside an interior that is recomputed, cuts that interior's K and V in two.  The island's tokens stand in the
stream between both halves.  Positions are *logical* (the prompt without separators); *stream indices* count
the stream's own tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .checkpoints import Checkpoint, CheckpointRule, boundaries, checkpoints
from .islands import QuestionFinder, Ranges, query_of
from .keys import Namespace, Role, SegmentKey, segment_key
from .media import Media, outside
from .pieces import ParsedPrompt, Piece, PromptError
from .policies import LinkMethod


@dataclass(frozen=True)
class Part:
    """Tokens ``[first, stop)`` of a segment.  Stream rows from index ``at`` on see them as public K and V."""

    at: int
    first: int
    stop: int


@dataclass(frozen=True)
class CachedSegment:
    """One use of a record in a prompt.

    ``tokens`` are the segment's own.  The segment is computed behind ``context``, another record, or behind
    ``dummies`` dummy tokens and the tokens ``anchor``, which are dropped afterwards.  The record covers the
    interior ``[head, len - tail)``.  Token ``i`` stands at logical position ``start + offsets[i]``;
    ``offsets`` is ``None`` where each offset is ``i``.
    The request reads the interior's ``parts``, in order and without the islands between them; a part is empty
    where an island begins or ends the interior.  The last part applies the record's states.
    """

    key: SegmentKey
    role: Role
    tokens: tuple[int, ...]
    offsets: tuple[int, ...] | None
    start: int
    head: int
    tail: int
    dummies: int
    anchor: tuple[int, ...]
    context: CachedSegment | None = None
    parts: tuple[Part, ...] = ()
    media: Media = ()
    """Images, by the indices of ``tokens``."""
    learned: bool = False
    """The record's K and V come from a learned context, which replaces the K and V computed of its tokens."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints from which the record's computation resumes, ascending."""
    is_prefix: bool = False
    """The segment is the prefix of a prompt without segments.  A resumed prefix is exact, so a computation of
    it may end at any checkpoint."""

    @property
    def compose_at(self) -> int:
        """The stream index before which the record's states are applied."""
        return self.parts[-1].at

    @property
    def columns(self) -> int:
        """The number of the interior's tokens, whose K and V are in the record."""
        return self.stop - self.head

    @property
    def reused(self) -> int:
        """The number of the interior's tokens that the stream does not compute."""
        return sum(part.stop - part.first for part in self.parts)

    @property
    def has_scratch_slot(self) -> bool:
        """Whether the record takes a second slot, and as many transition blocks, until it is complete."""
        return bool(self.checkpoints) and self.role is Role.INTERIOR

    @property
    def prepended(self) -> int:
        """The number of tokens that a segment request computes before the segment's own, and drops."""
        return self.dummies + len(self.anchor)

    @property
    def before(self) -> int:
        """The position, in its segment request, of the segment's first token."""
        return self.prepended + (0 if self.context is None else self.context.span)

    @property
    def span(self) -> int:
        """The number of positions that the segment takes."""
        return len(self.tokens) if self.offsets is None else self.offsets[-1] + 1

    @property
    def stop(self) -> int:
        """The index of the interior's end: the record holds no later tokens."""
        return len(self.tokens) - self.tail

    def offsets_of(self, part: Part) -> range | tuple[int, ...]:
        """Return the offsets from ``start`` of the part's tokens."""
        if self.offsets is None:
            return range(part.first, part.stop)
        return self.offsets[part.first : part.stop]


@dataclass(frozen=True)
class PoolLimits:
    """Limits on a request's use of the public pool.

    ``pages`` of ``page_tokens`` tokens, of which each state takes ``state_pages``; ``slots`` for states;
    ``max_request_tokens``: tokens of a segment request; ``tiles``: transition blocks, of which an interior
    segment takes at most ``record_tiles``.  Instances send routers these numbers under these names.
    """

    pages: int
    slots: int
    page_tokens: int
    max_request_tokens: int
    tiles: int = 0
    record_tiles: int = 0
    state_pages: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for numbers below 0, and for pages that hold no token."""
        for name, value in vars(self).items():
            least = 1 if name == "page_tokens" else 0
            if value < least:
                raise ValueError(f"limits.{name}={value}: expected at least {least}")


@dataclass(frozen=True)
class PromptPlan:
    """Immutable plan of one request.

    ``contexts``: records behind which other records are computed, and that are no segments of the prompt.
    ``stream`` and ``positions`` have equal length; generated tokens continue at ``n_logical``.
    ``salt`` names all that decides the stream's KV besides its tokens.  The salt is ``None`` where the stream
    is exact and may share vLLM's prefix cache with ordinary requests.
    """

    segments: tuple[CachedSegment, ...]
    stream: tuple[int, ...]
    positions: tuple[int, ...]
    n_logical: int
    method: LinkMethod
    warm_only: bool
    salt: str | None
    contexts: tuple[CachedSegment, ...] = ()
    media: Media = ()
    """All images of the prompt, by logical positions.  The stream or a record holds each image as a whole."""

    @property
    def records(self) -> tuple[CachedSegment, ...]:
        """All records that must be in the pool: contexts, then the segments in the prompt's order."""
        return self.contexts + self.segments

    def prompt(self) -> list[int]:
        """Return the prompt's tokens in logical order, without primitives."""
        placed = dict(zip(self.positions, self.stream, strict=True))
        for s in self.segments:
            offsets = range(len(s.tokens)) if s.offsets is None else s.offsets
            placed.update((s.start + o, t) for o, t in zip(offsets, s.tokens, strict=True))
        return [placed[position] for position in sorted(placed)]


IslandChooser = Callable[[Sequence[tuple[int, ...]], tuple[int, ...], int], list[Ranges]]
"""Interiors' tokens, the query's tokens and a budget in tokens -> the ranges to recompute of each interior.
All ranges together stay within the budget.  The function must be pure, like
:func:`~vllm_hypic.primitives.islands.choose_islands`."""


def build_plan(
    prompt: ParsedPrompt,
    method: LinkMethod,
    namespace: Namespace,
    limits: PoolLimits,
    *,
    min_segment_tokens: int,
    kept: Collection[SegmentKey] = (),
    most: PoolLimits | None = None,
    context: Sequence[int] = (),
    learned: str = "",
    choose_islands: IslandChooser | None = None,
    find_question: QuestionFinder | None = None,
    checkpoint_tokens: int = 0,
    reads_successors: bool = False,
) -> PromptPlan:
    """Plan one request.  The function changes nothing, and depends on its arguments alone.

    ``kept``: keys of records whose memory ``limits`` does not count; ``most``: limits on all records of the
    request together, including ``kept`` records; ``context``: tokens of the fixed context, for methods with
    such a context; ``learned``: digest of the context's file where it is learned; ``choose_islands``: needed
    by methods with islands; ``find_question``: finds the question's range ``[start, stop)`` in a prompt's
    tokens, ``None``: all tokens behind the last segment are the question; ``checkpoint_tokens``: tokens
    between two checkpoints of a record, 0: no checkpoints; ``reads_successors``: some layers read each
    token's successor.  The token behind a leading segment differs by prompt.  The leading record therefore
    leaves out the segment's last token, and keys of checkpoints cover the token behind them.
    The stream computes a segment (exactly) if its interior would be shorter than ``min_segment_tokens``, or
    if the request's earlier segments fill the pool.  Other requests never decide whether a segment is cached.
    Raises :class:`PromptError` for a prompt without tokens.
    """
    last = len(prompt.pieces) - 1
    cached: dict[int, CachedSegment] = {}
    contexts: tuple[CachedSegment, ...] = ()
    if last and method.reuse:
        budget = Budget(limits, kept, most)
        lead = prompt.pieces[0]
        rule = CheckpointRule(checkpoint_tokens, reads_successors)
        leading = _leading_record(
            lead, namespace, min_segment_tokens, rule, prompt.media, tail=int(reads_successors)
        )
        if leading is not None and budget.take(leading):
            cached[0] = leading
        behind = _context_record(method, lead, context, namespace, learned, rule, prompt.media)
        if behind is not None and budget.take(behind):
            contexts = (behind,)
        images = lead.own(prompt.media)
        anchored = min(method.anchor, lead.dependent_from)
        # Anchors are text alone: each segment would compute an image of the anchor again.
        anchor = lead.tokens[: min(anchored, images[0].start) if images else anchored]
        for index, piece in enumerate(prompt.pieces[1:last], 1):
            # A segment that is too long behind the context is computed without a context.
            before = next((c for c in contexts if budget.fits(c.span + piece.dependent_from)), None)
            segment = _interior_record(
                piece, method, anchor, before, namespace, min_segment_tokens, rule, prompt.media
            )
            if segment is not None and budget.take(segment):
                cached[index] = segment
        if not any(s.context for s in cached.values()) or (contexts and contexts[0].key in _keys(cached)):
            contexts = ()
    islands = _islands(prompt, cached, method, choose_islands, find_question)
    return assemble(prompt, cached, islands, contexts, method)


def _keys(cached: Mapping[int, CachedSegment]) -> set[SegmentKey]:
    return {s.key for s in cached.values()}


def _islands(
    prompt: ParsedPrompt,
    cached: Mapping[int, CachedSegment],
    method: LinkMethod,
    choose: IslandChooser | None,
    find_question: QuestionFinder | None,
) -> dict[int, Ranges]:
    """Return the ranges of tokens in cached interior segments that the stream computes, by index of piece."""
    inside = {i: s for i, s in cached.items() if s.role is Role.INTERIOR}
    if method.islands is None or not prompt.pieces[-1].tokens or not inside:
        return {}
    query = query_of(prompt, cached, find_question)
    if choose is None:
        raise ValueError(f"{method.islands}: expected the argument choose_islands")
    interiors = [s.tokens[s.head : s.stop] for s in inside.values()]
    chosen = choose(interiors, query, method.islands.budget(sum(map(len, interiors))))
    return {
        i: outside(((s.head + first, s.head + stop) for first, stop in ranges), s.media)
        for (i, s), ranges in zip(inside.items(), chosen, strict=True)
    }


def assemble(
    prompt: ParsedPrompt,
    cached: Mapping[int, CachedSegment],
    islands: Mapping[int, Ranges],
    contexts: tuple[CachedSegment, ...],
    method: LinkMethod,
) -> PromptPlan:
    """Return the plan whose stream computes all tokens that no record in ``cached`` (by piece) serves."""
    segments: list[CachedSegment] = []
    stream: list[int] = []
    positions: list[int] = []

    def compute(piece: Piece, first: int, stop: int) -> None:
        stream.extend(piece.tokens[first:stop])
        positions.extend(piece.positions[first:stop])

    for index, piece in enumerate(prompt.pieces):
        segment = cached.get(index)
        if segment is None:
            compute(piece, 0, len(piece.tokens))
            continue
        compute(piece, 0, segment.head)
        parts, first = [], segment.head
        for begin, end in islands.get(index, ()):
            parts.append(Part(len(stream), first, begin))
            compute(piece, begin, end)
            first = end
        parts.append(Part(len(stream), first, segment.stop))
        segments.append(replace(segment, parts=tuple(parts)))
        compute(piece, segment.stop, len(piece.tokens))
    if not stream and not segments:
        raise PromptError("the prompt has no tokens besides separators, PDep and padding")
    return PromptPlan(
        segments=tuple(segments),
        stream=tuple(stream),
        positions=tuple(positions),
        n_logical=prompt.n_logical,
        method=method,
        warm_only=len(prompt.pieces) > 1 and not prompt.pieces[-1].tokens,
        salt=_stream_salt(segments, [*positions, prompt.n_logical], method),
        contexts=contexts,
        media=prompt.media,
    )


class _Room:
    """The unused rest of some limits."""

    def __init__(self, limits: PoolLimits) -> None:
        self._pages, self._slots, self._blocks = limits.pages, limits.slots, limits.tiles

    def has(self, pages: int, slots: int, blocks: int) -> bool:
        return pages <= self._pages and slots <= self._slots and blocks <= self._blocks

    def take(self, pages: int, slots: int, blocks: int) -> None:
        self._pages -= pages
        self._slots -= slots
        self._blocks -= blocks


class Budget:
    """A greedy count of the pool's memory that a request's distinct records take; see :func:`build_plan`."""

    def __init__(self, limits: PoolLimits, kept: Collection[SegmentKey], most: PoolLimits | None) -> None:
        self._limits, self._kept, self._seen = limits, kept, set[SegmentKey]()
        self._of_all = [] if most is None else [_Room(most)]
        self._of_others = [*self._of_all, _Room(limits)]

    def fits(self, tokens: int) -> bool:
        """Whether a segment request may compute ``tokens`` tokens."""
        return tokens <= self._limits.max_request_tokens

    def take(self, segment: CachedSegment) -> bool:
        if not self.fits(segment.before + segment.stop):
            return False
        if segment.key in self._seen:
            return True
        # A stretch's record is computed in one slot, from the record in the other slot.
        slots = 2 if segment.has_scratch_slot else 1
        pages = -(-segment.columns // self._limits.page_tokens) + slots * self._limits.state_pages
        blocks = 0 if segment.role is Role.LEADING else self._limits.record_tiles
        rooms = self._of_all if segment.key in self._kept else self._of_others
        if not all(room.has(pages, slots, slots * blocks) for room in rooms):
            return False
        for room in rooms:
            room.take(pages, slots, slots * blocks)
        self._seen.add(segment.key)
        return True


def _leading_record(
    piece: Piece,
    namespace: Namespace,
    min_tokens: int,
    rule: CheckpointRule,
    media: Media = (),
    tail: int = 0,
) -> CachedSegment | None:
    """Return the record of the leading segment's own tokens without the last ``tail``, or ``None``.

    ``None``: the segment is too short for a record, or padding moves it away from position 0.  In the latter
    case, its record would be no prefix.  A segment with an image at its end has no tail, because a record
    serves an image as a whole.
    """
    tokens = piece.tokens[: piece.dependent_from]
    own = piece.own(media)
    if any(medium.stop > len(tokens) - tail for medium in own):
        tail = 0
    stop = len(tokens) - tail
    if stop < max(1, min_tokens) or piece.positions[0] != 0:
        return None
    offsets = _offsets(piece)
    ends = boundaries(0, stop, rule.every, own)
    begins = partial(
        segment_key, namespace, Role.LEADING, head=0, checkpoint_tokens=rule.every if ends else 0
    )
    key = begins(tokens, tail=tail, offsets=offsets, media=own)
    found = checkpoints(begins((), tail=0), ends, tokens, offsets, own, successors=rule.successors)
    return CachedSegment(key, Role.LEADING, tokens, offsets, 0, 0, tail, 0, (), media=own, checkpoints=found)


def _context_record(
    method: LinkMethod,
    lead: Piece,
    context: Sequence[int],
    namespace: Namespace,
    learned: str,
    rule: CheckpointRule,
    media: Media,
) -> CachedSegment | None:
    """Return the leading record behind which interior segments are computed; ``None``: without context."""
    if method.context == "none":
        return None
    if method.context == "lead":
        return _leading_record(lead, namespace, 1, rule, media)
    if not context:
        raise ValueError(f"context {method.context!r}: no tokens given")
    tokens = tuple(context)
    if method.context == "learned":
        key = segment_key(namespace, Role.LEADING, tokens, head=0, tail=0, learned=learned)
        return CachedSegment(key, Role.LEADING, tokens, None, 0, 0, 0, 0, (), learned=True)
    return _leading_record(Piece(tokens, range(len(tokens)), len(tokens)), namespace, 1, rule)


def _interior_record(
    piece: Piece,
    method: LinkMethod,
    anchor: tuple[int, ...],
    context: CachedSegment | None,
    namespace: Namespace,
    min_tokens: int,
    rule: CheckpointRule,
    media: Media,
) -> CachedSegment | None:
    """Return the record of ``piece``'s own tokens, or ``None`` for a piece that is too short for a record.

    Seam windows cut no image: the stream computes an image, or the record serves it, as a whole.
    """
    tokens = piece.tokens[: piece.dependent_from]
    head, stop = method.head, len(tokens) - method.tail
    own = piece.own(media)
    for medium in own:
        head = medium.start if medium.cut_by(head) else head
        stop = medium.stop if medium.cut_by(stop) else stop
    tail = len(tokens) - stop
    if len(tokens) - head - tail < max(1, min_tokens):
        return None
    start, offsets = piece.positions[0], _offsets(piece)
    ends = boundaries(head, stop, rule.every, own)
    begins = partial(
        segment_key,
        namespace,
        Role.INTERIOR,
        head=head,
        dummies=method.dummies,
        anchor=anchor,
        fixed_start=start if method.fixed_position else None,
        context=None if context is None else context.key,
        checkpoint_tokens=rule.every if ends else 0,
    )
    found = checkpoints(begins((), tail=0), ends, tokens, offsets, own, successors=rule.successors)
    return CachedSegment(
        begins(tokens, tail=tail, offsets=offsets, media=own),
        Role.INTERIOR,
        tokens,
        offsets,
        start,
        head,
        tail,
        method.dummies,
        anchor,
        context,
        media=own,
        checkpoints=found,
    )


def _offsets(piece: Piece) -> tuple[int, ...] | None:
    """Return offsets, from the first token, of the tokens before the first PDep; ``None``: their indices."""
    start, own = piece.positions[0], piece.positions[: piece.dependent_from]
    return None if own[-1] - start == len(own) - 1 else tuple(p - start for p in own)


def _stream_salt(
    segments: Sequence[CachedSegment], positions: Sequence[int], method: LinkMethod
) -> str | None:
    """Return a digest of the stream's geometry: records, compose points and jumps in ``positions``.

    The last of ``positions`` is that of the first generated token, as vLLM's prefix cache has answers, too.
    The digest leaves out query tokens, so a later turn over the same segments finds the earlier turn's
    stream.  A prompt without records and without jumps is exact and keeps the ordinary salt (``None``).
    """
    jumps = [(i, p) for i, p in enumerate(positions) if p != (positions[i - 1] + 1 if i else 0)]
    if not segments and not jumps:
        return None
    body: list[object] = [
        [(s.key, s.start, s.compose_at) for s in segments],
        jumps,
        method.use_transition,
    ]
    if cut := [[(p.at, p.first, p.stop) for p in s.parts] for s in segments if len(s.parts) > 1]:
        body.append(cut)
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
