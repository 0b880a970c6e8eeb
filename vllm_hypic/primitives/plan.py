"""Tokens -> :class:`PromptPlan`: the one description of a PIC request that everything reads.

A prompt ``lead SEP doc1 SEP doc2 SEP query`` becomes a *stream* of the tokens that must be
computed, in logical order,

    [head of doc1] | [tail of doc1][head of doc2] | [tail of doc2][query]

and, at each ``|``, a *compose point* where one cached segment's interior is applied.  Positions are
*logical* (the prompt without separators); *stream indices* count the stream's own tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from .keys import Namespace, Role, SegmentKey, segment_key
from .policies import LinkMethod
from .tokens import PrimitiveIds


class PromptError(ValueError):
    """A prompt whose primitives make no sense."""


@dataclass(frozen=True)
class Piece:
    """Tokens between two separators.

    ``tokens`` with their logical ``positions``; tokens from ``dependent_from`` on follow a PDep
    and belong to the stream.
    """

    tokens: tuple[int, ...]
    positions: range | tuple[int, ...]
    dependent_from: int


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt cut at its primitives; the last piece is the query (it may be empty)."""

    pieces: tuple[Piece, ...]
    n_logical: int
    has_primitives: bool


def parse_prompt(ids: Sequence[int], primitives: PrimitiveIds) -> ParsedPrompt:
    """Cut ``ids`` at the primitives.  Separators and PDep occupy no position, padding one each.

    Prompts are long and primitives few: work per token is left to slices and ranges.
    """
    pieces: list[Piece] = []
    tokens: list[int] = []
    runs: list[range] = []
    dependent_from: int | None = None
    position = begin = 0
    ids = list(ids)
    marks = _where(ids, primitives)
    for mark in [*marks, len(ids)]:
        if mark > begin:
            tokens += ids[begin:mark]
            runs.append(range(position, position + mark - begin))
            position += mark - begin
        begin = mark + 1
        primitive = ids[mark] if mark < len(ids) else primitives.sep
        if primitive == primitives.sep:
            cut = len(tokens) if dependent_from is None else dependent_from
            pieces.append(Piece(tuple(tokens), _joined(runs), cut))
            tokens, runs, dependent_from = [], [], None
        elif primitive == primitives.pad:
            position += 1
        elif dependent_from is None:
            dependent_from = len(tokens)
    return ParsedPrompt(tuple(pieces), position, bool(marks))


def _where(ids: list[int], primitives: PrimitiveIds) -> list[int]:
    """Indices of all primitives, ascending."""
    marks: list[int] = []
    for primitive in (primitives.sep, primitives.pdep, primitives.pad):
        at = -1
        for _ in range(ids.count(primitive)):
            at = ids.index(primitive, at + 1)
            marks.append(at)
    return sorted(marks)


def _joined(runs: list[range]) -> range | tuple[int, ...]:
    """Positions of neighbouring runs of tokens; a range where there is no padding between them."""
    if not runs:
        return range(0)
    if all(left.stop == right.start for left, right in pairwise(runs)):
        return range(runs[0].start, runs[-1].stop)
    return tuple(chain.from_iterable(runs))


@dataclass(frozen=True)
class CachedSegment:
    """One use of a record in a prompt.

    ``tokens`` are the segment's own; it is computed behind ``dummies`` dummy tokens and the tokens
    ``anchor``, of which nothing is kept; the record covers the interior ``[head, len - tail)``.  Token
    ``i`` stands at logical position ``start + offsets[i]`` (``offsets`` is ``None`` when it is just
    ``i``).  The record is applied before stream index ``compose_at``.
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
    compose_at: int

    @property
    def columns(self) -> int:
        """Tokens of the interior, which the record has K and V of."""
        return self.stop - self.head

    @property
    def before(self) -> int:
        """The tokens that the segment is computed behind."""
        return self.dummies + len(self.anchor)

    @property
    def stop(self) -> int:
        """The interior's end: later tokens have no part in the record."""
        return len(self.tokens) - self.tail

    def interior_offsets(self) -> range | tuple[int, ...]:
        """Offsets from ``start`` of the interior's tokens."""
        return range(self.head, self.stop) if self.offsets is None else self.offsets[self.head : self.stop]


@dataclass(frozen=True)
class PoolLimits:
    """What one request may take of the public pool: pages, state slots, tokens of a segment request; and
    ``tiles``, the transition blocks, of which an interior segment takes at most ``record_tiles``.

    Instances tell routers these numbers under these names.
    """

    pages: int
    slots: int
    page_tokens: int
    max_request_tokens: int
    tiles: int = 0
    record_tiles: int = 0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for numbers below 0, and pages that hold no token."""
        for name, value in vars(self).items():
            least = 1 if name == "page_tokens" else 0
            if value < least:
                raise ValueError(f"limits.{name}={value}: expected at least {least}")


@dataclass(frozen=True)
class PromptPlan:
    """Immutable plan of one request.

    ``stream`` and ``positions`` have equal length; generated tokens continue at ``n_logical``.
    ``salt`` names everything that the stream's KV depends on besides its tokens: ``None`` when the
    stream is exact and may share vLLM's prefix cache with ordinary requests.
    """

    segments: tuple[CachedSegment, ...]
    stream: tuple[int, ...]
    positions: tuple[int, ...]
    n_logical: int
    method: LinkMethod
    warm_only: bool
    salt: str | None


def build_plan(
    prompt: ParsedPrompt,
    method: LinkMethod,
    namespace: Namespace,
    limits: PoolLimits,
    *,
    min_segment_tokens: int,
    kept: Collection[SegmentKey] = (),
) -> PromptPlan:
    """Plan one request.  Changes nothing; depends on its arguments alone.  Records in ``kept`` have their
    place beside ``limits``.

    A segment is computed in the stream (exact) when its interior would be shorter than
    ``min_segment_tokens`` or when the request's segments so far fill the pool: whether a segment is
    cached never depends on what other requests do.  Raises :class:`PromptError` when nothing is
    left to do.
    """
    segments: list[CachedSegment] = []
    stream: list[int] = []
    positions: list[int] = []
    budget = _Budget(limits, kept)
    last = len(prompt.pieces) - 1
    lead = prompt.pieces[0]
    anchor = lead.tokens[: min(method.anchor, lead.dependent_from)] if last else ()
    for index, piece in enumerate(prompt.pieces):
        begin = 0
        if index < last and method.reuse:
            begin = piece.dependent_from
            role = Role.LEADING if index == 0 else Role.INTERIOR
            segment = _try_segment(piece, role, method, anchor, namespace, min_segment_tokens)
            if segment is None or not budget.take(segment):
                begin = 0
            else:
                head, cut = segment.head, piece.dependent_from - segment.tail
                stream += piece.tokens[:head]
                positions += piece.positions[:head]
                segments.append(replace(segment, compose_at=len(stream)))
                stream += piece.tokens[cut : piece.dependent_from]
                positions += piece.positions[cut : piece.dependent_from]
        stream += piece.tokens[begin:]
        positions += piece.positions[begin:]
    warm_only = last > 0 and not prompt.pieces[-1].tokens
    if not stream and not segments:
        raise PromptError("the prompt has no tokens besides separators, PDep and padding")
    return PromptPlan(
        segments=tuple(segments),
        stream=tuple(stream),
        positions=tuple(positions),
        n_logical=prompt.n_logical,
        method=method,
        warm_only=warm_only,
        salt=_stream_salt(segments, positions, method),
    )


class _Budget:
    """Greedy count of what a request's distinct records take of the pool."""

    def __init__(self, limits: PoolLimits, kept: Collection[SegmentKey]) -> None:
        self.limits, self.pages, self.slots, self.blocks = limits, 0, 0, 0
        self.seen = set(kept)

    def take(self, segment: CachedSegment) -> bool:
        too_long = segment.before + segment.stop > self.limits.max_request_tokens
        if segment.key in self.seen and not too_long:
            return True
        pages = self.pages + -(-segment.columns // self.limits.page_tokens)
        blocks = self.blocks + (0 if segment.role is Role.LEADING else self.limits.record_tiles)
        if (
            too_long
            or pages > self.limits.pages
            or self.slots + 1 > self.limits.slots
            or blocks > self.limits.tiles
        ):
            return False
        self.pages, self.slots, self.blocks = pages, self.slots + 1, blocks
        self.seen.add(segment.key)
        return True


def _try_segment(
    piece: Piece,
    role: Role,
    method: LinkMethod,
    anchor: tuple[int, ...],
    namespace: Namespace,
    min_tokens: int,
) -> CachedSegment | None:
    """The record of ``piece``'s own tokens, or ``None`` when it is too short for one."""
    tokens = piece.tokens[: piece.dependent_from]
    leading = role is Role.LEADING
    head, tail = (0, 0) if leading else (method.head, method.tail)
    dummies, anchor = (0, ()) if leading else (method.dummies, anchor)
    if len(tokens) - head - tail < max(1, min_tokens):
        return None
    if leading and piece.positions[0] != 0:
        # Padding before the leading segment moves it away from position 0; its record would not
        # be the prefix that "leading" promises.
        return None
    start = piece.positions[0]
    offsets = None
    if piece.positions[len(tokens) - 1] - start != len(tokens) - 1:
        offsets = tuple(p - start for p in piece.positions[: len(tokens)])
    key = segment_key(
        namespace,
        role,
        tokens,
        head=head,
        tail=tail,
        dummies=dummies,
        anchor=anchor,
        offsets=offsets,
        fixed_start=start if method.fixed_position and not leading else None,
    )
    return CachedSegment(key, role, tokens, offsets, start, head, tail, dummies, anchor, compose_at=-1)


def _stream_salt(
    segments: Sequence[CachedSegment], positions: Sequence[int], method: LinkMethod
) -> str | None:
    """Digest of the stream's geometry: records, compose points and jumps in position.

    Query tokens are not in it, so a later turn over the same segments finds the earlier turn's
    stream; a prompt without records and without jumps is exact and keeps the ordinary salt.
    """
    jumps = [(i, p) for i, p in enumerate(positions) if p != (positions[i - 1] + 1 if i else 0)]
    if not segments and not jumps:
        return None
    body = [
        [(s.key, s.start, s.compose_at) for s in segments],
        jumps,
        method.use_transition,
    ]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
