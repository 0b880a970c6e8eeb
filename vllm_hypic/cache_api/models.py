"""Requests and answers of the cache API's routes, with the descriptions in OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import VLLMValidationError

from .answers import Role
from .forms import MAX_TOKEN_ID

MIN_TTL_S = 0.1  # a shorter time would end before compile answers
MAX_TTL_S = 10 * 365 * 86400.0
MAX_PAGE = 1000
MAX_ID = 128

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]
Ttl = Annotated[
    float | None,
    Field(
        ge=MIN_TTL_S,
        le=MAX_TTL_S,
        allow_inf_nan=False,
        description="Seconds to live from now; with null the segment lives until it is deleted.",
    ),
]
CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=128,
        description="The tenant, as in vLLM's own requests. Other tenants find none of its ids and records.",
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
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("text", "tokens", "message")
            ]
        }
    )

    text: str | None = Field(
        default=None, min_length=1, description="Text of the segment, without separators."
    )
    tokens: list[TokenId] | None = Field(
        default=None,
        min_length=1,
        description="Token ids of the segment, without separators. A leading segment begins with the tokens "
        "that the tokenizer puts before every text.",
    )
    message: MessagePart | None = Field(
        default=None,
        description="Chat message of the segment. A leading segment is compiled with the text that the chat "
        "template puts around the message; an interior segment is the message's content.",
    )
    role: Role | None = Field(
        default=None,
        description="`interior`: usable anywhere in a prompt. `leading`: first in a prompt or chat, cached "
        "whole. The default is `leading` for system and developer messages, else `interior`.",
    )
    ttl_s: Ttl = None
    pinned: bool = Field(
        default=False, description="Keep the segment's record in the pool, whatever else needs room."
    )
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

    pinned: bool | None = Field(
        default=None, description="Pin or unpin the record; pinning recomputes an evicted record."
    )
    ttl_s: Ttl = None
    cache_salt: CacheSalt = None


class WeightsRequest(_Request):
    """What the model's weights are called."""

    name: str = Field(
        max_length=128,
        description="Name of the weights, equal on every server that has them. Empty: the weights that the "
        "server started with.",
    )


class HealthInfo(BaseModel):
    status: Literal["ok"] = Field(description="The engine answers commands.")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorAnswer(BaseModel):
    error: ErrorInfo


def answer(kind: type) -> dict[int | str, dict[str, Any]]:
    """Return the entry in a route's ``responses`` for an answer of type ``kind`` from :func:`encoded`."""
    [schema], parts = msgspec.json.schema_components([kind], ref_template="{name}")
    return {200: {"content": {"application/json": {"schema": _whole(schema, parts)}}}}


def _whole(schema: Any, parts: Mapping[str, Any]) -> Any:
    """Return ``schema`` with each reference replaced by the schema that the reference names."""
    if isinstance(schema, list):
        return [_whole(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {**_whole(parts[schema["$ref"]], parts), **{k: v for k, v in schema.items() if k != "$ref"}}
    return {name: _whole(one, parts) for name, one in schema.items()}


def encoded(found: msgspec.Struct) -> Response:
    """Return the answer of a route as an HTTP response."""
    return Response(msgspec.json.encode(found), media_type="application/json")


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries in a route's ``responses`` for errors."""
    says = {
        400: "A value is not allowed; the message names the value.",
        404: "The id is unknown or has expired; the message names the id.",
        409: "The record cannot be pinned; the segment exists.",
        501: "The engine is not configured for the route; the message says why.",
        503: "The engine or the segment registry cannot answer now.",
        507: "The tenant has too many segments.",
    }
    return {status: {"model": ErrorAnswer, "description": says[status]} for status in statuses}


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error's body in vLLM's shape; ``message`` loses the paths of files, as in vLLM's errors."""
    phrase = HTTPStatus(status).phrase
    return {"error": {"message": sanitize_message(message), "type": phrase, "param": None, "code": status}}


def check_salt(salt: object) -> None:
    """Raise ``VLLMValidationError`` for a salt that vLLM refuses, and for half of a surrogate pair, which no
    message to the engine can hold."""
    validate_cache_salt(salt)
    if isinstance(salt, str) and any("\ud800" <= character <= "\udfff" for character in salt):
        raise VLLMValidationError(f"cache_salt={salt!r} is not valid Unicode text", parameter="cache_salt")
