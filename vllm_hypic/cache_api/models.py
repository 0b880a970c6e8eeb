"""Requests and answers of the cache API's routes, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .forms import MAX_TOKEN_ID

MIN_TTL_S = 0.1  # less would be over before compile answers
MAX_TTL_S = 10 * 365 * 86400.0
MAX_PAGE = 1000
MAX_ID = 128

Role = Literal["leading", "interior"]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]
Ttl = Annotated[
    float | None,
    Field(
        ge=MIN_TTL_S,
        le=MAX_TTL_S,
        allow_inf_nan=False,
        description="Seconds to live from now; null: until deleted.",
    ),
]
CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=128,
        description="The tenant, as in vLLM's own requests: a salt's ids and records are unknown to others.",
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Request):
    type: Literal["text"]
    text: str


class MessagePart(_Request):
    """A chat message whose content is the segment."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class CompileRequest(_Request):
    """A segment to compile: exactly one of ``text``, ``tokens`` and ``message``."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [name]} for name in ("text", "tokens", "message")]}
    )

    text: str | None = Field(
        default=None, min_length=1, description="The segment as text, without separators."
    )
    tokens: list[TokenId] | None = Field(
        default=None,
        min_length=1,
        description="The segment as token ids, without separators. A leading one begins with what the "
        "tokenizer puts before every text.",
    )
    message: MessagePart | None = Field(
        default=None,
        description="The segment as a chat message. A leading one is compiled with what the chat template "
        "puts around it; an interior one is its content.",
    )
    role: Role | None = Field(
        default=None,
        description="`interior`: usable anywhere in a prompt. `leading`: the first thing in a prompt or "
        "chat, cached whole. Default: `leading` for system and developer messages, else `interior`.",
    )
    ttl_s: Ttl = None
    pinned: bool = Field(default=False, description="Keep its record in the pool, whatever else needs room.")
    cache_salt: CacheSalt = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("text", "tokens", "message") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of text, tokens, message; got {', '.join(given) or 'none'}"
            )
        if self.role == "leading" and self.message and self.message.role in ("assistant", "tool"):
            raise ValueError(f"message.role={self.message.role!r} cannot lead a chat: use role 'interior'")
        return self


class ChangeRequest(_Request):
    """What to change; what is left out stays."""

    pinned: bool | None = Field(default=None, description="Pinning computes the record again if it is gone.")
    ttl_s: Ttl = None
    cache_salt: CacheSalt = None


class SegmentInfo(BaseModel):
    """A compiled segment."""

    id: str = Field(description="Unguessable; stands for the segment as `<|hypic_segment:ID|>` in prompts.")
    role: Role
    place: Literal["interior", "prompt", "chat"] = Field(
        description="Where it can stand: anywhere, first in a completion prompt, first in a chat."
    )
    tokens: int = Field(description="Its length in tokens.")
    bytes: int = Field(description="What its record takes of the pool now.")
    key: str | None = Field(
        description="Name of its record; null where it has none, being too short or too long for the pool."
    )
    created: float = Field(description="Unix time.")
    last_used: float = Field(description="Unix time of the last use by id.")
    expires: float | None = Field(description="Unix time; null: lives until deleted.")
    pinned: bool
    resident: bool = Field(description="Its record is in the pool now.")
    stored: bool = Field(description="A tier below was given its record.")
    text: str | None = Field(default=None, description="With `content=true`: the text it was compiled from.")
    token_ids: list[int] | None = Field(default=None, description="With `content=true`: all its tokens.")


class SegmentPage(BaseModel):
    """Segments in the order of their ids."""

    segments: list[SegmentInfo]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class StatsInfo(BaseModel):
    """Numbers of the whole engine, all tenants together."""

    tiers: dict[str, dict[str, float]] = Field(description="Numbers of each tier by name.")
    segments: int = Field(description="Compiled segments.")
    catalogue: Literal["memory", "file"] = Field(description="`file`: ids survive a restart.")


class LimitsInfo(BaseModel):
    """What one request may take of the pool."""

    pages: int
    slots: int
    page_tokens: int
    max_request_tokens: int
    tiles: int
    record_tiles: int


class DescriptionInfo(BaseModel):
    """What a router must know to plan as this instance does, and where its sockets are."""

    instance: str = Field(description="Another at every start of the engine.")
    model: list[str] = Field(description="Names under which the model is served, without adapters.")
    namespace: str = Field(description="Instances exchange records only if theirs are equal.")
    landing: str = Field(description="Where records land: `tcp://HOST:PORT`.")
    events: str = Field(description="Where changes of what is cached are published: `tcp://HOST:PORT`.")
    separator: int
    pdep: int
    pad: int
    link: str
    seam_tokens: int
    min_segment_tokens: int
    max_model_len: int
    has_linear: bool
    has_attention: bool
    deadline_s: float = Field(description="Longest that a request waits for other instances.")
    quadratic: float = Field(
        description="Prefilling n tokens takes FLOPs in proportion to n + quadratic * n^2."
    )
    shared_tiers: list[str] = Field(
        description="Identities of the store's tiers that other instances use, too, fastest first."
    )
    limits: LimitsInfo


class HealthInfo(BaseModel):
    status: Literal["ok"] = Field(description="The engine answers commands.")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorAnswer(BaseModel):
    error: ErrorInfo


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route."""
    says = {
        400: "A value is not allowed; the message names it.",
        404: "The id is unknown or has expired; the message names it.",
        409: "The record cannot be pinned.",
        501: "The engine is not configured for it.",
        503: "The engine or the catalogue cannot answer now.",
    }
    return {status: {"model": ErrorAnswer, "description": says[status]} for status in statuses}
