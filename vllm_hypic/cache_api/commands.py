"""Commands of the cache API on their way to the scheduler, and the answers on their way back.

A command travels as an ordinary engine request: in ``SamplingParams.extra_args["hypic_command"]``, with a
prompt of one token (:class:`Compile`: the segment to warm; :class:`Explain`: the request's own), and the
scheduler ends it unrun.  The answer comes back in the output's ``kv_transfer_params``.  In the front end a
command is an instance of one of these classes, which no JSON of a client can become; the engine's process
gets plain data and converts it back.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ..segment_parallel.description import Description
from .answers import CacheStats, Explanation, Place, Segment, SegmentPage, Weights

COMMAND = "hypic_command"
"""Name of a command among a request's extra arguments."""
_ANSWER, _FAILURE = "hypic", "hypic_failure"
"""Names of an answer in an output's ``kv_transfer_params``."""

MOST_RESOLVED, MOST_RESOLVED_TOKENS = 64, 1 << 16
"""Ids, and about as many tokens, that one :class:`Resolve` looks up: the engine's next step waits for it."""
MOST_IDS = 1024
"""Different ids in one request."""

Ttl = float | None | UnsetType
"""Seconds from now; ``None``: lives until deleted; ``UNSET``: as it is."""


class Command(msgspec.Struct, tag_field="op", frozen=True, forbid_unknown_fields=True):
    """A command; the request's own ``cache_salt`` says whose segments it is about."""


class Compile(Command, tag="compile", frozen=True):
    """Warm the segment that the request's prompt holds and give it an id.  Answer: :class:`Segment`."""

    place: Place
    text: str | None = None
    bare_from: int = 0
    ttl_s: Ttl = UNSET
    pin: bool = False
    id: str | None = None
    """The id that another replica gave it; ``None``: a new one, or that which it has here."""


class Show(Command, tag="show", frozen=True):
    """Answer: :class:`Segment`, with what it stands for if ``content``."""

    id: str
    content: bool = False


class Page(Command, tag="page", frozen=True):
    """Answer: :class:`SegmentPage`."""

    after: str
    limit: int


class Change(Command, tag="change", frozen=True):
    """Change time to live, or take the pin away.  Answer: :class:`Segment`."""

    id: str
    ttl_s: Ttl = UNSET
    unpin: bool = False


class Delete(Command, tag="delete", frozen=True):
    """Forget the id, and its record everywhere.  Answer: :class:`Segment`, as it was."""

    id: str


class Resolve(Command, tag="resolve", frozen=True):
    """Say what the first ids stand for, as many as one step may look up.  Answer: :class:`Resolved`."""

    ids: list[str]


class Report(Command, tag="report", frozen=True):
    """Answer: :class:`CacheStats`."""


class Describe(Command, tag="describe", frozen=True):
    """Answer: :class:`Description`."""


class NameWeights(Command, tag="name_weights", frozen=True):
    """Begin the generation of records of the weights of this name, unless it is the present one.  Answer:
    :class:`Weights`."""

    name: str


class Explain(Command, tag="explain", frozen=True):
    """Say what the request, which is complete but for this command, would be.  Answer: :class:`Explanation`,
    without texts."""


AnyCommand = Compile | Show | Page | Change | Delete | Resolve | Report | Describe | NameWeights | Explain


class Content(msgspec.Struct, frozen=True):
    """``text``, or ``token_ids`` where the segment was compiled from tokens."""

    place: Place
    text: str | None
    token_ids: list[int]


class Resolved(msgspec.Struct, frozen=True):
    """What the first of the ids stand for; ids that are neither in ``contents`` nor in ``unknown`` were not
    looked up: ask for them again."""

    contents: dict[str, Content]
    unknown: list[str]


class Failure(msgspec.Struct, frozen=True):
    """The command was refused; ``status`` is the HTTP status that says so."""

    status: int
    message: str
    id: str | None = None


Answer = Segment | SegmentPage | Resolved | CacheStats | Description | Weights | Explanation | Failure

_Wanted = TypeVar("_Wanted", Segment, SegmentPage, Resolved, CacheStats, Description, Weights, Explanation)


class BadAnswer(RuntimeError):
    """The engine's answer is none that belongs to the command."""


def take_command(extra_args: dict[str, Any]) -> tuple[AnyCommand | Failure | None, dict[str, Any]]:
    """Split a request's extra arguments, as the scheduler gets them, into the command and the others; a
    damaged command is a failure, ``None``: there is none."""
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
    """Whether ``value`` is a command made in this process, as opposed to a client's imitation."""
    return isinstance(value, AnyCommand)


def pack(answer: Answer) -> dict[str, Any]:
    """The answer as plain data."""
    return {_FAILURE if isinstance(answer, Failure) else _ANSWER: msgspec.to_builtins(answer)}


def unpack(packed: dict[str, Any] | None, wanted: type[_Wanted]) -> _Wanted | Failure:
    """The inverse of :func:`pack`; raises :class:`BadAnswer` for anything else."""
    found = packed or {}
    try:
        if _FAILURE in found:
            return msgspec.convert(found[_FAILURE], Failure)
        return msgspec.convert(found[_ANSWER], wanted)
    except (KeyError, msgspec.ValidationError) as e:
        raise BadAnswer(f"expected {wanted.__name__}, got {str(packed)[:200]} ({e})") from e
