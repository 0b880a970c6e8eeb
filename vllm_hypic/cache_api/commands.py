"""Commands that the cache API sends to the scheduler, and the scheduler's answers.

A command travels as an ordinary engine request, in ``SamplingParams.extra_args["hypic_command"]``.  The
request's prompt is a single token, for :class:`Compile` the segment to warm, for :class:`Explain` the
explained prompt.  The scheduler ends the request unrun, with the answer in the output's
``kv_transfer_params``.  In the front end a command is an instance of a class below, which no client's JSON
can become.  The engine's process gets plain data and converts the data back to the class.

The module imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ..segment_parallel.description import Description
from .answers import CacheStats, Explanation, Place, Segment, SegmentPage, Weights

COMMAND = "hypic_command"
"""Name of the extra argument that holds a request's command."""
_ANSWER, _FAILURE = "hypic", "hypic_failure"
"""Names of an answer and of a failure in an output's ``kv_transfer_params``."""

MOST_RESOLVED, MOST_RESOLVED_TOKENS = 64, 1 << 16
"""Limits on ids, and roughly on tokens, of a :class:`Resolve`, for which the engine's next step waits."""
MOST_IDS = 1024
"""Limit on the distinct ids in a request."""

Ttl = float | None | UnsetType
"""Seconds to live from now; ``None``: until deletion; ``UNSET``: the time to live stays unchanged."""


class Command(msgspec.Struct, tag_field="op", frozen=True, forbid_unknown_fields=True):
    """A command about the segments of the tenant that the request's own ``cache_salt`` names."""


class Compile(Command, tag="compile", frozen=True):
    """Warm the segment in the request's prompt, and give the segment an id.  Answer: :class:`Segment`."""

    place: Place
    text: str | None = None
    bare_from: int = 0
    ttl_s: Ttl = UNSET
    pin: bool = False
    id: str | None = None
    """The id from another replica; with ``None`` the segment keeps its id here, or gets a new id."""


class Show(Command, tag="show", frozen=True):
    """Answer: :class:`Segment`, with its text and tokens if ``content``."""

    id: str
    content: bool = False


class Page(Command, tag="page", frozen=True):
    """Answer: :class:`SegmentPage`."""

    after: str
    limit: int


class Change(Command, tag="change", frozen=True):
    """Change the time to live, or remove the pin.  Answer: :class:`Segment`."""

    id: str
    ttl_s: Ttl = UNSET
    unpin: bool = False


class Delete(Command, tag="delete", frozen=True):
    """Delete the id, and the segment's record everywhere.  Answer: the deleted :class:`Segment`."""

    id: str


class Resolve(Command, tag="resolve", frozen=True):
    """Look up the contents of the first ids, within the limits of one step.  Answer: :class:`Resolved`."""

    ids: list[str]


class Report(Command, tag="report", frozen=True):
    """Answer: :class:`CacheStats`."""


class Describe(Command, tag="describe", frozen=True):
    """Answer: :class:`Description`."""


class NameWeights(Command, tag="name_weights", frozen=True):
    """Begin a generation of records for the weights called ``name``, unless that name is the present one.
    Answer: :class:`Weights`."""

    name: str


class Explain(Command, tag="explain", frozen=True):
    """Plan the request that carries this command, and do not run it.  Answer: :class:`Explanation` without
    texts."""


AnyCommand = Compile | Show | Page | Change | Delete | Resolve | Report | Describe | NameWeights | Explain


class Content(msgspec.Struct, frozen=True):
    """Content of a segment: ``text``, or ``token_ids`` if the segment was compiled from tokens."""

    place: Place
    text: str | None
    token_ids: list[int]


class Resolved(msgspec.Struct, frozen=True):
    """Contents of the first ids of a :class:`Resolve`.  Ids that are neither in ``contents`` nor in
    ``unknown`` were not looked up: the client must ask for these ids again."""

    contents: dict[str, Content]
    unknown: list[str]


class Failure(msgspec.Struct, frozen=True):
    """The engine refused the command; ``status`` is the HTTP status for the client."""

    status: int
    message: str
    id: str | None = None


Answer = Segment | SegmentPage | Resolved | CacheStats | Description | Weights | Explanation | Failure

_Wanted = TypeVar("_Wanted", Segment, SegmentPage, Resolved, CacheStats, Description, Weights, Explanation)


class BadAnswer(RuntimeError):
    """The engine's answer does not belong to the command."""


def take_command(extra_args: dict[str, Any]) -> tuple[AnyCommand | Failure | None, dict[str, Any]]:
    """Split a request's extra arguments, as the scheduler gets them, into the command and all others.  A
    damaged command becomes a :class:`Failure`; a request without a command gives ``None``."""
    others = {name: value for name, value in extra_args.items() if name != COMMAND}
    found = extra_args.get(COMMAND)
    if found is None or isinstance(found, AnyCommand):
        return found, others
    try:
        command: AnyCommand = msgspec.convert(found, AnyCommand)
    except msgspec.ValidationError as e:
        return Failure(400, f"{COMMAND}: {e}"), others
    return command, others


def is_command(value: object) -> bool:
    """Whether ``value`` is a command made in this process, and not a client's imitation."""
    return isinstance(value, AnyCommand)


def pack(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain data."""
    return {_FAILURE if isinstance(answer, Failure) else _ANSWER: msgspec.to_builtins(answer)}


def unpack(packed: dict[str, Any] | None, wanted: type[_Wanted]) -> _Wanted | Failure:
    """Undo :func:`pack`; raise :class:`BadAnswer` for any other data."""
    found = packed or {}
    try:
        if _FAILURE in found:
            return msgspec.convert(found[_FAILURE], Failure)
        return msgspec.convert(found[_ANSWER], wanted)
    except (KeyError, msgspec.ValidationError) as e:
        raise BadAnswer(f"expected {wanted.__name__}, got {str(packed)[:200]} ({e})") from e
