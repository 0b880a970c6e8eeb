"""Executes commands of the cache API: updates the segment registry, and the store to match the registry."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import UNSET

from ..primitives.keys import SegmentKey
from ..segment_parallel.description import Description
from .answers import CacheStats, Segment, SegmentPage, Weights
from .commands import (
    MOST_RESOLVED,
    MOST_RESOLVED_TOKENS,
    Answer,
    AnyCommand,
    Change,
    Compile,
    Content,
    Delete,
    Describe,
    Explain,
    Failure,
    NameWeights,
    Page,
    Report,
    Resolve,
    Resolved,
    Show,
    Ttl,
    pack,
)
from .registry import Claim, Entry, RegistryError, SegmentRegistry, TooManySegments

logger = logging.getLogger("vllm.hypic.commands")


class RecordState(Protocol):
    """A record's place: in the pool (``resident``), in a tier (``stored``)."""

    @property
    def resident(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stored(self) -> bool: ...


class Records(Protocol):
    """Operations of the handler on records.  A key without a record is no error."""

    def pin_record(self, key: SegmentKey, tokens: int, *, leading: bool, tenant: str) -> None:
        """Keep the record of a segment of ``tokens`` tokens in the pool, also if the record comes later.
        Raises ``ValueError`` with the reason if the pool has too little room for other requests, or if the
        tenant has its share already."""

    def unpin_record(self, key: SegmentKey) -> None: ...

    def drop_record(self, key: SegmentKey) -> None:
        """Delete the record everywhere; the pool deletes the record when no request uses it."""

    def expire_record(self, key: SegmentKey, at: float | None) -> None:
        """Delete the record everywhere at the time ``at`` (seconds since the epoch)."""

    def record_state(self, key: SegmentKey) -> RecordState: ...

    def pool_stats(self) -> dict[str, float]:
        """Return numbers of the pool."""

    def store_stats(self) -> dict[str, dict[str, float]]:
        """Return numbers of each tier."""


@dataclass(frozen=True)
class _Compiling:
    """A segment that a request warms, with the command to execute when the request ends."""

    command: Compile
    tokens: list[int]
    key: SegmentKey | None
    salt: str | None


class CommandHandler:
    """Executes an engine's commands on the scheduler's thread.

    ``owner_of`` makes a tenant's name in the registry from a salt.  ``describe`` returns what routers need to
    know, or ``None`` if this engine serves no router.  ``name_weights`` begins a generation of records.  A
    registry that cannot be opened, or fails later, fails the command, never the engine; the next command
    tries again.
    """

    def __init__(
        self,
        open_registry: Callable[[], SegmentRegistry],
        records: Records,
        owner_of: Callable[[str | None], str],
        clock: Callable[[], float] = time.time,
        describe: Callable[[], Description | None] = lambda: None,
        name_weights: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._open_registry = open_registry
        self._opened: SegmentRegistry | None = None
        self._records, self._owner_of = records, owner_of
        self._clock = clock
        self._describe, self._name_weights = describe, name_weights
        self._answers: dict[str, Answer | _Compiling] = {}
        """Answers for requests that have not ended, by request id."""

    def start(self) -> None:
        """Open the registry, and restore the pins and times to live of earlier runs."""
        try:
            _ = self._registry
        except RegistryError as e:
            logger.error("the cache API refuses all commands until this error is fixed: %s", e)

    @property
    def _registry(self) -> SegmentRegistry:
        if self._opened is None:
            self._opened = self._open_registry()
            if self._opened.set_aside is not None:
                logger.error(
                    "the segment registry was damaged: all ids are lost; the damaged file is kept as %s",
                    self._opened.set_aside,
                )
            self._restore()
        return self._opened

    def _restore(self) -> None:
        """Restore pins and times to live of an earlier run's entries; remove pins that are refused now."""
        try:
            self._sweep()
            for key, entry in self._registry.claimed().items():
                claims = self._registry.claims(key)
                if any(claim.pinned for claim in claims):
                    try:
                        self._records.pin_record(
                            key, entry.n_tokens, leading=entry.place.leading, tenant=entry.owner
                        )
                    except ValueError as e:
                        logger.warning("record %s is no longer pinned: %s", key[:12], e)
                        self._registry.unpin_all(key)
                if (end := _end(claims)) is not None:
                    self._records.expire_record(key, end)
        except RegistryError as e:
            logger.error("pins and times to live of an earlier run cannot be restored: %s", e)

    def submit(self, request_id: str, command: AnyCommand | Failure, salt: str | None) -> None:
        """Execute a request's command now; :meth:`take_answer` returns the answer when the request ends."""
        answer = command if isinstance(command, Failure) else self.execute(command, salt)
        self.submit_answer(request_id, answer)

    def submit_answer(self, request_id: str, answer: Answer) -> None:
        """Note the answer of an executed command; :meth:`take_answer` returns it when the request ends."""
        self._answers[request_id] = answer

    def submit_compile(
        self, request_id: str, command: Compile, tokens: list[int], key: SegmentKey | None, salt: str | None
    ) -> None:
        """Note that the request warms the segment ``tokens``; :meth:`take_answer` gives the segment an id."""
        self._answers[request_id] = _Compiling(command, tokens, key, salt)

    def take_answer(self, request_id: str) -> dict[str, Any] | None:
        """Return the packed answer of a request that ends, or ``None`` if the request had no command."""
        answer = self._answers.pop(request_id, None)
        if isinstance(answer, _Compiling):
            answer = self.compiled(answer.command, answer.tokens, answer.key, answer.salt)
        return None if answer is None else pack(answer)

    def forget(self, request_id: str) -> None:
        """Forget an aborted request, so that its segment gets no id."""
        self._answers.pop(request_id, None)

    def execute(self, command: AnyCommand, salt: str | None) -> Answer:
        """Execute a command at once, except :class:`Compile` (see :meth:`compiled`) and :class:`Explain`."""
        try:
            self._sweep()
            return self._execute(command, self._owner_of(salt))
        except RegistryError as e:
            return _unavailable(e)

    def _execute(self, command: AnyCommand, owner: str) -> Answer:
        match command:
            case Show(id=segment_id, content=content):
                entry = self._registry.get(owner, segment_id)
                return _unknown(segment_id) if entry is None else self._shown(owner, entry, content)
            case Page(after=after, limit=limit):
                entries = self._registry.page(owner, after, limit + 1)
                shown = [self._segment(e) for e in entries[:limit]]
                return SegmentPage(shown, shown[-1].id if len(entries) > limit else None)
            case Change(id=segment_id, ttl_s=ttl_s, unpin=unpin):
                entry = self._registry.get(owner, segment_id)
                if entry is None:
                    return _unknown(segment_id)
                if unpin:
                    self._registry.set_pinned(owner, segment_id, False)
                self._set_ttl(owner, segment_id, ttl_s)
                return self._settled(owner, entry)
            case Delete(id=segment_id):
                entry = self._registry.get(owner, segment_id)
                if entry is None:
                    return _unknown(segment_id)
                gone = self._segment(entry)
                self._registry.remove(owner, segment_id)
                self._settle(entry)
                return gone
            case Resolve(ids=ids):
                return self._resolved(owner, ids)
            case Report():
                where: Literal["memory", "file"] = "memory" if self._registry.path is None else "file"
                tiers = {"pool": self._records.pool_stats(), **self._records.store_stats()}
                return CacheStats(tiers, len(self._registry), where)
            case Describe():
                reason = "this engine runs without the option section segment_parallel"
                return self._describe() or Failure(501, reason)
            case NameWeights(name=name):
                self._name_weights(name)
                return Weights(name)
            case Compile() | Explain():
                raise TypeError(f"{type(command).__name__}: only the scheduler answers this command")

    def compiled(
        self, command: Compile, tokens: list[int], key: SegmentKey | None, salt: str | None
    ) -> Answer:
        """Register the warmed segment ``tokens``; ``key`` names its record (``None``: not worth a record)."""
        try:
            self._sweep()
            return self._compiled(command, tokens, key, self._owner_of(salt))
        except RegistryError as e:
            return _unavailable(e)

    def _compiled(self, command: Compile, tokens: list[int], key: SegmentKey | None, owner: str) -> Answer:
        try:
            entry = self._registry.add(
                owner,
                command.place,
                tokens,
                text=command.text,
                bare_from=command.bare_from,
                key=key,
                segment_id=command.id,
            )
        except TooManySegments as e:
            return Failure(507, str(e))
        self._set_ttl(owner, entry.id, command.ttl_s)
        if command.pin:
            if key is None:
                return _refused_pin(entry, "a segment too short, or too long for the pool, has no record")
            try:
                self._records.pin_record(key, len(tokens), leading=command.place.leading, tenant=entry.owner)
            except ValueError as e:
                return _refused_pin(entry, str(e))
            self._registry.set_pinned(owner, entry.id, True)
        return self._settled(owner, entry)

    def _resolved(self, owner: str, ids: list[str]) -> Resolved:
        contents, unknown, n_tokens = {}, [], 0
        for segment_id in dict.fromkeys(ids[:MOST_RESOLVED]):
            if n_tokens >= MOST_RESOLVED_TOKENS:
                break
            found = self._registry.content(owner, segment_id)
            n_tokens += 0 if found is None else len(found.tokens)
            if found is None:
                unknown.append(segment_id)
            else:
                bare = [] if found.text is not None else list(found.tokens[found.bare_from :])
                contents[segment_id] = Content(found.place, found.text, bare)
        return Resolved(contents, unknown)

    def _set_ttl(self, owner: str, segment_id: str, ttl_s: Ttl) -> None:
        if ttl_s is not UNSET:
            expires = None if ttl_s is None else self._clock() + ttl_s
            self._registry.set_expires(owner, segment_id, expires)

    def _settled(self, owner: str, entry: Entry) -> Segment | Failure:
        """Update the entry's record, and return the entry as a segment."""
        self._settle(entry)
        now = self._registry.get(owner, entry.id)
        return _unknown(entry.id) if now is None else self._segment(now)

    def _settle(self, before: Entry) -> None:
        """Update the record of a changed entry: the record lives as long as any of its entries.

        A record without any time to live stays under the store's own rules.
        """
        if before.key is None:
            return
        claims = self._registry.claims(before.key)
        if before.pinned and not any(claim.pinned for claim in claims):
            self._records.unpin_record(before.key)
        if not claims:
            self._records.drop_record(before.key)
        elif before.expires is not None or any(claim.expires is not None for claim in claims):
            self._records.expire_record(before.key, _end(claims))

    def _sweep(self) -> None:
        for entry in self._registry.take_expired():
            self._settle(entry)

    def _shown(self, owner: str, entry: Entry, content: bool) -> Segment | Failure:
        if not content:
            return self._segment(entry)
        found = self._registry.content(owner, entry.id)
        if found is None:
            return _unknown(entry.id)
        return self._segment(entry, text=found.text, token_ids=tuple(found.tokens))

    def _segment(
        self, entry: Entry, text: str | None = None, token_ids: tuple[int, ...] | None = None
    ) -> Segment:
        state = None if entry.key is None else self._records.record_state(entry.key)
        return Segment(
            id=entry.id,
            role="leading" if entry.place.leading else "interior",
            place=entry.place,
            tokens=entry.n_tokens,
            key=entry.key,
            bytes=0 if state is None else state.nbytes,
            created=entry.created,
            last_used=entry.last_used,
            expires=entry.expires,
            pinned=entry.pinned,
            resident=state is not None and state.resident,
            stored=state is not None and state.stored,
            text=text,
            token_ids=token_ids,
        )


def _end(claims: list[Claim]) -> float | None:
    """Return when the last entry expires, or ``None`` if some entry never expires."""
    ends = [claim.expires for claim in claims if claim.expires is not None]
    return max(ends) if ends and len(ends) == len(claims) else None


def _unknown(segment_id: str) -> Failure:
    return Failure(404, f"segment {segment_id!r} is unknown or has expired", segment_id)


def _refused_pin(entry: Entry, reason: str) -> Failure:
    return Failure(409, f"segment {entry.id!r} is compiled, but cannot be pinned: {reason}", entry.id)


def _unavailable(error: RegistryError) -> Failure:
    logger.error("a command of the cache API failed: %s", error)
    return Failure(503, f"the segment registry cannot be used now: {error}")
