"""Answers of the cache API: one form for the scheduler that gives them, HTTP that carries them, and clients.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from ..primitives.parts import SEGMENT_PART
from .forms import id_form

Role = Literal["leading", "interior"]
RecordPlace = Literal["resident", "pending", "stored", "unknown", "absent"]


class Place(StrEnum):
    """Where a segment can stand in a prompt."""

    INTERIOR = "interior"
    """Anywhere."""
    PROMPT = "prompt"
    """First in a completion prompt: its tokens include what the tokenizer puts before every text."""
    CHAT = "chat"
    """First message of a chat: its tokens include what the chat template puts around it."""

    @property
    def leading(self) -> bool:
        return self is not Place.INTERIOR


def _says(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Weights(msgspec.Struct, frozen=True):
    """What the model's weights are called now."""

    name: Annotated[str, _says("Empty: those that the server was started with.")]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled segment.  Times are Unix times; ``expires`` ``None``: it lives until it is deleted."""

    id: Annotated[str, _says("Unguessable; stands for the segment as `<|hypic_segment:ID|>` in prompts.")]
    role: Role
    place: Annotated[
        Place, _says("Where it can stand: anywhere, first in a completion prompt, first in a chat.")
    ]
    tokens: Annotated[int, _says("Its length in tokens.")]
    bytes: Annotated[int, _says("What its record takes of the pool now.")]
    key: Annotated[
        str | None,
        _says("Name of its record; null where it has none, being too short or too long for the pool."),
    ]
    created: Annotated[float, _says("Unix time.")]
    last_used: Annotated[float, _says("Unix time of the last use by id.")]
    expires: Annotated[float | None, _says("Unix time; null: lives until deleted.")]
    pinned: bool
    resident: Annotated[bool, _says("Its record is in the pool now.")]
    stored: Annotated[bool, _says("A tier below was given its record.")]
    text: Annotated[str | None, _says("With `content=true`: the text it was compiled from.")] = None
    token_ids: Annotated[tuple[int, ...] | None, _says("With `content=true`: all its tokens.")] = None

    @property
    def form(self) -> str:
        """The text that stands for the segment in prompts and messages."""
        return id_form(self.id)

    @property
    def part(self) -> dict[str, str]:
        """What stands for the segment among the parts of a prompt or of a message's content."""
        return {"type": SEGMENT_PART, "id": self.id}


class SegmentPage(msgspec.Struct, frozen=True):
    """Segments in the order of their ids."""

    segments: list[Segment]
    next: Annotated[str | None, _says("`after` of the next page; null: this is the last.")]


class Run(msgspec.Struct, frozen=True):
    """Tokens of one part that fare alike."""

    start: Annotated[int, _says("Index of its first token in the prompt.")]
    stop: Annotated[int, _says("Index behind its last token.")]
    recomputed: Annotated[
        bool, _says("A seam window or an island of a segment: computed in every request, cached or not.")
    ] = False
    text: str = ""


class PromptPart(msgspec.Struct, frozen=True):
    """Neighbouring tokens of a prompt with one fate; its runs are all of it."""

    kind: Annotated[
        Literal["leading", "segment", "stream", "primitive"],
        _says(
            "`leading`: cached as it stands; `segment`: cached for any place; `stream`: computed with full "
            "context; `primitive`: separators and the like, which the model does not see."
        ),
    ]
    runs: list[Run]
    key: Annotated[str | None, _says("Name of its record, as `key` of compiled segments.")] = None
    state: Annotated[
        RecordPlace | None,
        _says(
            "Where its record is: in the pool; on its way there; in a tier below, which was given it or had "
            "it; `unknown`: not in the pool, and the tiers are asked when the request comes; nowhere."
        ),
    ] = None
    context: Annotated[str | None, _says("Name of the record that its own is computed behind.")] = None

    @property
    def start(self) -> int:
        """Index of its first token in the prompt."""
        return self.runs[0].start

    @property
    def stop(self) -> int:
        """Index behind its last token."""
        return self.runs[-1].stop

    @property
    def reused(self) -> bool:
        """Whether the segment has a record already, so that none need be computed."""
        return self.state in ("resident", "pending", "stored")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would be now.  ``parts``, in order, are the whole prompt; of its tokens that are no
    primitives each is reused, in vLLM's prefix cache, or computed."""

    mode: Annotated[
        str, _says("How segments were looked for: a mode of `hypic_segment`, `named` or `separators`.")
    ]
    link: Annotated[str, _says("The link method.")]
    pieces: Annotated[dict[str, int], _says("What became of the pieces found, as the metrics count it.")]
    prompt_tokens: Annotated[int, _says("As in `usage`.")]
    tokens_reused: Annotated[int, _says("Read from records, if none leaves in between.")]
    tokens_prefix_cached: Annotated[
        int, _says("Of the tokens that no record has: those in vLLM's own prefix cache now.")
    ]
    tokens_computed: Annotated[int, _says("All others; records of `unknown` state count as computed.")]
    reason: Annotated[
        str | None,
        _says(
            "Why it has no segment that could be cached, or is not answered; null: a request with segments."
        ),
    ]
    parts: list[PromptPart]


class CacheStats(msgspec.Struct, frozen=True):
    """Numbers of the whole engine, all tenants together."""

    tiers: Annotated[dict[str, dict[str, float]], _says("Numbers of each tier by name.")]
    segments: Annotated[int, _says("Compiled segments.")]
    registry: Annotated[Literal["memory", "file"], _says("`file`: ids survive a restart.")]
    catalogue: Annotated[
        Literal["memory", "file"], _says("Former name of `registry`; goes with the next release.")
    ]
