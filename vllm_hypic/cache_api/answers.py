"""Answers of the cache API, with the same classes in the scheduler, in the HTTP routes and in clients.

The module imports neither vLLM nor torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from ..primitives.tokens import SEGMENT_PART
from .forms import id_form

Role = Literal["leading", "interior"]
RecordPlace = Literal["resident", "pending", "stored", "unknown", "absent"]


class Place(StrEnum):
    """Where a segment can stand in a prompt."""

    INTERIOR = "interior"
    """The segment may stand anywhere."""
    PROMPT = "prompt"
    """The segment begins a completion prompt; its tokens include those that the tokenizer always adds."""
    CHAT = "chat"
    """The segment is a chat's first message; its tokens include the chat template's around the message."""

    @property
    def leading(self) -> bool:
        return self is not Place.INTERIOR


def _says(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Weights(msgspec.Struct, frozen=True):
    """What the model's weights are called now."""

    name: Annotated[str, _says("Name of the weights; empty: the weights that the server started with.")]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled segment.  Times are Unix times; ``expires`` ``None``: it lives until it is deleted."""

    id: Annotated[
        str, _says("Unguessable id, which stands for the segment as `<|hypic_segment:ID|>` in prompts.")
    ]
    role: Annotated[Role, _says("`leading` or `interior`.")]
    place: Annotated[
        Place, _says("Place in prompts: anywhere, first in a completion prompt, or first in a chat.")
    ]
    tokens: Annotated[int, _says("Length in tokens.")]
    bytes: Annotated[int, _says("Bytes of the pool that the record takes now.")]
    key: Annotated[
        str | None,
        _says("Name of the record; null where the segment is too short or too long for a record."),
    ]
    created: Annotated[float, _says("Unix time of the compilation.")]
    last_used: Annotated[float, _says("Unix time of the last use by id.")]
    expires: Annotated[
        float | None, _says("Unix time of the expiry; null: the segment lives until it is deleted.")
    ]
    pinned: Annotated[bool, _says("The record is pinned to the pool.")]
    resident: Annotated[bool, _says("The pool holds the record now.")]
    stored: Annotated[bool, _says("A tier of the store was given the record.")]
    text: Annotated[str | None, _says("With `content=true`: the text that was compiled.")] = None
    token_ids: Annotated[
        tuple[int, ...] | None, _says("With `content=true`: all token ids of the segment.")
    ] = None

    @property
    def form(self) -> str:
        """Return the text that stands for the segment in prompts and messages."""
        return id_form(self.id)

    @property
    def part(self) -> dict[str, str]:
        """Return the part that stands for the segment in a prompt or in a message's content."""
        return {"type": SEGMENT_PART, "id": self.id}


class SegmentPage(msgspec.Struct, frozen=True):
    """Segments in the order of their ids."""

    segments: Annotated[list[Segment], _says("Segments of this page.")]
    next: Annotated[str | None, _says("Parameter `after` of the next page; null on the last page.")]


class Run(msgspec.Struct, frozen=True):
    """Tokens of one part that fare alike."""

    start: Annotated[int, _says("Index of the run's first token in the prompt.")]
    stop: Annotated[int, _says("Index behind the run's last token.")]
    recomputed: Annotated[
        bool, _says("The run is a seam window or an island, computed in every request.")
    ] = False
    text: Annotated[str, _says("Text of the run.")] = ""


class PromptPart(msgspec.Struct, frozen=True):
    """Neighbouring tokens of a prompt with one fate; its runs are all of it."""

    kind: Annotated[
        Literal["leading", "segment", "stream", "primitive"],
        _says(
            "Kind of the part. The record of a `leading` part serves the start of prompts, the record of a "
            "`segment` any position. The engine computes a `stream` part with full context. A `primitive` is "
            "a separator, PDep or padding, which the model does not see."
        ),
    ]
    runs: Annotated[list[Run], _says("Runs of tokens, which together are the whole part.")]
    key: Annotated[str | None, _says("Name of the part's record, as `key` of a compiled segment.")] = None
    state: Annotated[
        RecordPlace | None,
        _says(
            "`resident`: in the pool; `pending`: on its way there; `stored`: a tier was given the record or "
            "had it; `unknown`: not in the pool, and tiers are asked later; `absent`: nowhere."
        ),
    ] = None
    context: Annotated[str | None, _says("Name of the record that the part's record is computed behind.")] = (
        None
    )

    @property
    def start(self) -> int:
        """Return the index of the part's first token in the prompt."""
        return self.runs[0].start

    @property
    def stop(self) -> int:
        """Return the index behind the part's last token."""
        return self.runs[-1].stop

    @property
    def reused(self) -> bool:
        """Whether the segment has a record already, so that the engine need not compute one."""
        return self.state in ("resident", "pending", "stored")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would be now.  ``parts``, in order, are the whole prompt; of its tokens that are no
    primitives each is reused, in vLLM's prefix cache, or computed."""

    mode: Annotated[
        str, _says("How segments are found: a mode of `hypic_segment_mode`, `named` or `separators`.")
    ]
    link: Annotated[str, _says("The link method.")]
    pieces: Annotated[dict[str, int], _says("Counts of the pieces, by the names of the metrics.")]
    prompt_tokens: Annotated[int, _says("Tokens of the prompt, as in `usage`.")]
    tokens_reused: Annotated[int, _says("Tokens that would be read from records.")]
    tokens_prefix_cached: Annotated[int, _says("Further tokens, which vLLM's own prefix cache holds now.")]
    tokens_computed: Annotated[
        int, _says("All other tokens; records of the state `unknown` count as computed.")
    ]
    reason: Annotated[
        str | None,
        _says(
            "Why no part can be cached, or why the prompt gets no answer; null for a request with segments."
        ),
    ]
    parts: Annotated[list[PromptPart], _says("Parts of the prompt, in order.")]


class CacheStats(msgspec.Struct, frozen=True):
    """Numbers of the whole engine, all tenants together."""

    tiers: Annotated[
        dict[str, dict[str, float]], _says("Statistics of the pool and of each tier, by the tier's name.")
    ]
    segments: Annotated[int, _says("Number of compiled segments.")]
    registry: Annotated[Literal["memory", "file"], _says("`memory`, or `file`, where ids survive a restart.")]
