"""Per-request options, carried by vLLM's own extra-argument fields.

``vllm_xargs`` of the OpenAI endpoints and ``SamplingParams(extra_args=...)`` of Python both arrive
as one flat mapping.  The plugin's keys have the prefix ``hypic_``.  Each process that reads a request's
options reads them once, by :func:`parse_request`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .keys import SegmentKey
from .policies import LinkError, LinkMethod, parse_link
from .segmenter import SEGMENT_MODES, Spans

LINK = "hypic_link"
SEAM = "hypic_seam_tokens"
CONTEXT = "hypic_context"
ISLANDS = "hypic_islands"
SEGMENT = "hypic_segment_mode"
SEGMENTS = "hypic_segment_ranges"
FOUND = "hypic_found"
"""Message of the front end to the scheduler: :class:`FoundSegments` as a mapping.  Clients cannot set it."""
PUSH_TO = "hypic_push_to"
PUSH_DEADLINE = "hypic_push_deadline_s"
REMOTE = "hypic_remote"
REMOTE_DEADLINE = "hypic_remote_deadline_s"
PERMIT = "hypic_permit"
PREFIX = "hypic_"
TRANSFER = (PUSH_TO, PUSH_DEADLINE, REMOTE, REMOTE_DEADLINE)
"""Options that only routers may send, with a permit (``segment_parallel/permits.py``)."""
KNOWN = (LINK, SEAM, CONTEXT, ISLANDS, SEGMENT, SEGMENTS, *TRANSFER, PERMIT)

TIER = "tier:"
"""Prefix of a destination that is a tier; the tier's identity follows."""

_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_REMOTE = 4096
MAX_SEGMENTS = 4096
"""Most segments of one prompt that a request may name, or a segment mode may find."""


@dataclass(frozen=True)
class LinkDefaults:
    """An engine's defaults for requests: arguments of :func:`~vllm_hypic.primitives.policies.parse_link`.

    ``context`` and ``islands`` belong to ``link``.  A request with another link method has neither, unless
    the request names them.
    """

    link: str
    seam_tokens: int
    context: str = "none"
    islands: str = "none"


def did_you_mean(unknown: str, known: Collection[str]) -> str:
    """Return the end of a refusal: the known name most like ``unknown``, or no text if no name is like it."""
    found = difflib.get_close_matches(unknown, known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def link_of_request(extra_args: Mapping[str, Any] | None, defaults: LinkDefaults) -> LinkMethod:
    """Return the link method of a request.  Raises :class:`LinkError`, which names the bad key or value."""
    named = link_options(extra_args, defaults)
    return parse_link(named[LINK], named[SEAM], named[CONTEXT], named[ISLANDS])


def link_options(extra_args: Mapping[str, Any] | None, defaults: LinkDefaults) -> dict[str, Any]:
    """Return all options that define a request's link method, with defaults filled in.  Raises
    :class:`LinkError` for an unknown option with the prefix ``hypic_``."""
    extra = extra_args or {}
    unknown = sorted(k for k in extra if isinstance(k, str) and k.startswith(PREFIX) and k not in KNOWN)
    if unknown:
        known = f"{', '.join(KNOWN)}{did_you_mean(unknown[0], KNOWN)}"
        raise LinkError(f"unknown request option {unknown[0]!r}: expected one of {known}")
    seam = extra.get(SEAM, defaults.seam_tokens)
    if isinstance(seam, float) and seam.is_integer():
        seam = int(seam)  # JSON clients send 8.0
    link = extra.get(LINK, defaults.link)
    usual = defaults if link == defaults.link else LinkDefaults(link, seam)
    return {
        LINK: link,
        SEAM: seam,
        CONTEXT: extra.get(CONTEXT, usual.context),
        ISLANDS: extra.get(ISLANDS, usual.islands),
    }


def segment_mode_of_request(extra_args: Mapping[str, Any] | None, default: str) -> str:
    """Return the mode that finds segments in a request without separators.  Raises :class:`LinkError`."""
    mode = (extra_args or {}).get(SEGMENT, default)
    if mode not in SEGMENT_MODES:
        raise LinkError(f"{SEGMENT}={mode!r}: expected one of {', '.join(SEGMENT_MODES)}")
    return mode


def spans_of_request(extra_args: Mapping[str, Any] | None, n_tokens: int) -> Spans | None:
    """Return the segments that the request names by their token indices, or ``None`` if it names no segments.

    Raises :class:`LinkError` for ranges that are empty, out of order or outside the prompt.
    """
    given = (extra_args or {}).get(SEGMENTS)
    return None if given is None else _spans(given, n_tokens)


def _spans(given: Any, n_tokens: int) -> Spans:
    whole = isinstance(given, (list, tuple)) and all(type(i) is int for i in given)
    if not whole or len(given) % 2 or len(given) > 2 * MAX_SEGMENTS:
        raise LinkError(
            f"{SEGMENTS}: expected a flat list of at most {2 * MAX_SEGMENTS} token indices, start and stop"
        )
    spans = tuple(zip(given[::2], given[1::2], strict=True))
    before = 0
    for start, stop in spans:
        if not before <= start < stop <= n_tokens:
            raise LinkError(
                f"{SEGMENTS}: [{start}, {stop}] after {before}: expected segments of at least one token, in "
                f"order, within the prompt's {n_tokens} tokens"
            )
        before = stop
    return spans


@dataclass(frozen=True)
class Transfer:
    """A request's options for records that other instances send or receive.

    ``push_to``: destination of the prompt's records: another instance (``tcp://HOST:PORT``), or a tier shared
    with it (``tier:IDENTITY``).  The records arrive there before the request ends; the prompt must end in a
    separator.  ``remote``: records of this prompt that are on their way here; the engine computes the records
    that have not come after ``remote_deadline_s``.
    """

    push_to: str | None = None
    push_deadline_s: float = 0.0
    remote: frozenset[SegmentKey] = frozenset()
    remote_deadline_s: float = 0.0


NO_TRANSFER = Transfer()


def tier_of(destination: str) -> str | None:
    """Return the identity of the tier ``destination``, or ``None`` if records go straight to an instance."""
    return destination.removeprefix(TIER) if destination.startswith(TIER) else None


def transfer_of_request(
    extra_args: Mapping[str, Any] | None, *, longest_s: float | None, shared: Collection[str] = ()
) -> Transfer:
    """Return the request's options of segment parallelism.  The front end has checked the request's permit.

    ``longest_s``: longest wait in seconds, and the default; ``None``: the engine runs without segment
    parallelism and refuses these options.  ``shared``: identities of the tiers to which records may go.
    Raises :class:`LinkError`, which names the bad key or value.
    """
    extra = extra_args or {}
    given = [k for k in TRANSFER if extra.get(k) is not None]
    if not given:
        return NO_TRANSFER
    if longest_s is None:
        raise LinkError(f"{given[0]}: this engine runs without the option section segment_parallel")
    to, remote = extra.get(PUSH_TO), extra.get(REMOTE, [])
    if to is not None and (not isinstance(to, str) or not to.startswith(("tcp://", TIER))):
        raise LinkError(f"{PUSH_TO}={to!r}: expected tcp://HOST:PORT or {TIER}IDENTITY")
    if to is not None and (tier := tier_of(to)) is not None and tier not in shared:
        known = f"one of {', '.join(shared)}" if shared else "a store tier that has the option shared"
        raise LinkError(f"{PUSH_TO}={to!r}: this engine has no such shared tier; expected {known}")
    if not isinstance(remote, (list, tuple)) or len(remote) > _MAX_REMOTE:
        raise LinkError(f"{REMOTE}: expected a list of at most {_MAX_REMOTE} segment keys")
    for key in remote:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise LinkError(f"{REMOTE}: {key!r} is no segment key: expected 64 hexadecimal digits")
    return Transfer(
        to,
        _seconds(extra, PUSH_DEADLINE, longest_s),
        frozenset(SegmentKey(key) for key in remote),
        _seconds(extra, REMOTE_DEADLINE, longest_s),
    )


@dataclass(frozen=True)
class FoundSegments:
    """Result of the front end's search for segments in a request that names none.

    ``mode``: mode of the search; ``spans``: the segments; ``counts``: numbers of pieces by outcome.
    """

    mode: str
    spans: Spans = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        """Return the message of these segments, of plain types."""
        return {
            "mode": self.mode,
            "ranges": list(chain.from_iterable(self.spans)),
            "counts": dict(self.counts),
        }

    @staticmethod
    def unpacked(message: Mapping[str, Any], n_tokens: int) -> FoundSegments:
        """Undo :meth:`packed`, for a prompt of ``n_tokens`` tokens."""
        return FoundSegments(message["mode"], _spans(message["ranges"], n_tokens), message["counts"])


@dataclass(frozen=True)
class RequestLimits:
    """An engine's defaults and limits for the options of requests.

    ``segment_mode``: default mode.  ``longest_s``, ``shared``: see :func:`transfer_of_request`.
    """

    link: LinkDefaults
    segment_mode: str = "off"
    longest_s: float | None = None
    shared: Collection[str] = ()


@dataclass(frozen=True)
class RequestSpec:
    """All options of one request, parsed.

    ``segment_mode``: the mode that finds segments where the request names none; ``named``: the segments that
    the request names by token indices; ``found``: segments that the front end has found.
    """

    link: LinkMethod
    segment_mode: str
    transfer: Transfer = NO_TRANSFER
    named: Spans | None = None
    found: FoundSegments | None = None

    @property
    def spans(self) -> Spans:
        """The segments, by token indices; empty for prompts with separators or without segments."""
        return self.named or (() if self.found is None else self.found.spans)

    @property
    def way(self) -> str:
        """Where the segments come from: a mode, ``named``, or ``separators``."""
        if self.found is not None:
            return self.found.mode
        return "separators" if self.named is None else "named"


def parse_request(
    extra_args: Mapping[str, Any] | None, n_tokens: int, limits: RequestLimits, *, from_client: bool
) -> RequestSpec:
    """Parse the options of a request whose prompt has ``n_tokens`` tokens.

    ``from_client``: false in the engine core, where the front end's message may stand beside the options.
    Raises :class:`LinkError`, which names the bad key or value.
    """
    extra = dict(extra_args or {})
    message = None if from_client else extra.pop(FOUND, None)
    return RequestSpec(
        link_of_request(extra, limits.link),
        segment_mode_of_request(extra, limits.segment_mode),
        transfer_of_request(extra, longest_s=limits.longest_s, shared=limits.shared),
        spans_of_request(extra, n_tokens),
        None if message is None else FoundSegments.unpacked(message, n_tokens),
    )


def _seconds(extra: Mapping[str, Any], name: str, longest_s: float) -> float:
    value = extra.get(name)
    if value is None:
        return longest_s
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not number or not 0 < value <= longest_s:
        raise LinkError(f"{name}={value!r}: expected seconds above 0 and at most {longest_s:g}")
    return float(value)
