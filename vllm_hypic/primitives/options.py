"""Per-request options, carried by vLLM's own extra-argument fields.

``vllm_xargs`` of the OpenAI endpoints and ``SamplingParams(extra_args=...)`` of Python both arrive
as one flat mapping; ours are the keys with the prefix ``hypic_``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
"""The front end's word to the scheduler: the mode by which it looked for segments, and what it found.  No
client's option."""
PUSH_TO = "hypic_push_to"
PUSH_DEADLINE = "hypic_push_deadline_s"
REMOTE = "hypic_remote"
REMOTE_DEADLINE = "hypic_remote_deadline_s"
PERMIT = "hypic_permit"
PREFIX = "hypic_"
TRANSFER = (PUSH_TO, PUSH_DEADLINE, REMOTE, REMOTE_DEADLINE)
"""What only routers may send, with a permit (``segment_parallel/permits.py``)."""
KNOWN = (LINK, SEAM, CONTEXT, ISLANDS, SEGMENT, SEGMENTS, *TRANSFER, PERMIT)

TIER = "tier:"
"""Prefix of a destination that is a tier; its identity follows."""

_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_REMOTE = 4096
_MAX_SEGMENTS = 4096


@dataclass(frozen=True)
class LinkDefaults:
    """What requests of an engine that name nothing else get: arguments of
    :func:`~vllm_hypic.primitives.policies.parse_link`.

    Context and islands were chosen for ``link``: a request that names another has none unless it names them.
    """

    link: str
    seam_tokens: int
    context: str = "none"
    islands: str = "none"


def did_you_mean(unknown: str, known: Collection[str]) -> str:
    """The end of a refusal: the known name that is most like the unknown one, if any is."""
    found = difflib.get_close_matches(unknown, known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def link_of_request(extra_args: Mapping[str, Any] | None, defaults: LinkDefaults) -> LinkMethod:
    """The link method a request asks for.  Raises :class:`LinkError` naming a bad key or value."""
    named = link_options(extra_args, defaults)
    return parse_link(named[LINK], named[SEAM], named[CONTEXT], named[ISLANDS])


def link_options(extra_args: Mapping[str, Any] | None, defaults: LinkDefaults) -> dict[str, Any]:
    """The options that say a request's link method, all of them.  Raises :class:`LinkError` for an unknown
    option of ours."""
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
    """How segments of the request are found where it has no separators.  Raises :class:`LinkError`."""
    mode = (extra_args or {}).get(SEGMENT, default)
    if mode not in SEGMENT_MODES:
        raise LinkError(f"{SEGMENT}={mode!r}: expected one of {', '.join(SEGMENT_MODES)}")
    return mode


def spans_of_request(extra_args: Mapping[str, Any] | None, n_tokens: int) -> Spans | None:
    """The segments that the request names by the places of their tokens; ``None``: it names none.

    Raises :class:`LinkError`.
    """
    given = (extra_args or {}).get(SEGMENTS)
    if given is None:
        return None
    whole = isinstance(given, (list, tuple)) and all(type(i) is int for i in given)
    if not whole or len(given) % 2 or len(given) > 2 * _MAX_SEGMENTS:
        raise LinkError(
            f"{SEGMENTS}: expected a flat list of at most {2 * _MAX_SEGMENTS} token indices, start and stop"
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
    """What a request says of records that come from other instances, or go to them.

    ``push_to``: the records of this prompt, which must end in a separator, are there before it ends: at
    another instance (``tcp://HOST:PORT``), or in a tier that is shared with it (``tier:IDENTITY``).
    ``remote``: these records of this prompt are on their way here; those that have not come after
    ``remote_deadline_s`` are computed.
    """

    push_to: str | None = None
    push_deadline_s: float = 0.0
    remote: frozenset[SegmentKey] = frozenset()
    remote_deadline_s: float = 0.0


NO_TRANSFER = Transfer()


def tier_of(destination: str) -> str | None:
    """The identity of the tier that records are to go to; ``None``: they go straight to an instance."""
    return destination.removeprefix(TIER) if destination.startswith(TIER) else None


def transfer_of_request(
    extra_args: Mapping[str, Any] | None, *, longest_s: float | None, shared: Collection[str] = ()
) -> Transfer:
    """The request's options of segment parallelism; that it may have them, the front end has checked.

    ``longest_s``: how long it may wait, and the default; ``None``: the engine is not configured for it, so
    that none may be given.  ``shared``: identities of the tiers that records may go to.  Raises
    :class:`LinkError` naming a bad key or value.
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


def _seconds(extra: Mapping[str, Any], name: str, longest_s: float) -> float:
    value = extra.get(name)
    if value is None:
        return longest_s
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not number or not 0 < value <= longest_s:
        raise LinkError(f"{name}={value!r}: expected seconds above 0 and at most {longest_s:g}")
    return float(value)
