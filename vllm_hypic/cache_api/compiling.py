"""Turns a client's text, tokens or message into the tokens that the segment will have in prompts.

vLLM's own tokenisation route renders the smallest prompt with the segment in its later place.  The tokens
between this prompt's separators are the segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from .answers import Place
from .control import Control
from .expand import CHAT, COMPLETIONS, rewriting
from .forms import ID_FORM, Seal
from .models import CompileRequest
from .rewriting import carrying


@dataclass(frozen=True)
class Compilable:
    """A segment to compile, of all ``tokens``; the id stands for ``text``, or else ``tokens[bare_from:]``."""

    place: Place
    tokens: list[int]
    text: str | None = None
    bare_from: int = 0


async def compilable(body: CompileRequest, control: Control, request: Request) -> Compilable:
    """Return the segment of a request; raise ``HTTPException`` (400) that names a value not allowed."""
    tokenization: ServingTokenization = request.app.state.serving_tokenization
    renderer = _Renderer(tokenization, request, control)
    if body.tokens is not None:
        segment = await _from_tokens(body.tokens, body.role == "leading", control, renderer)
    elif body.message is not None:
        system = body.message.role in ("system", "developer")
        leading = system if body.role is None else body.role == "leading"
        text = _checked_text("message.content", body.message.text(), control)
        if leading:
            segment = Compilable(Place.CHAT, await renderer.chat_start(body.message.role, text), text)
        else:
            segment = Compilable(Place.INTERIOR, await renderer.interior(text), text)
    else:
        text = _checked_text("text", body.text or "", control)
        if body.role == "leading":
            segment = Compilable(Place.PROMPT, await renderer.prompt_start(text), text)
        else:
            segment = Compilable(Place.INTERIOR, await renderer.interior(text), text)
    if not segment.tokens:
        raise HTTPException(400, "the segment has no tokens")
    if control.ids.contains(segment.tokens):
        raise HTTPException(
            400, "the chat template writes a primitive into the message: compile the segment from tokens"
        )
    if len(segment.tokens) > control.max_segment_tokens:
        raise HTTPException(
            400,
            f"the segment has {len(segment.tokens)} tokens: expected at most {control.max_segment_tokens} "
            f"(max_model_len is {control.max_model_len})",
        )
    return segment


async def _from_tokens(tokens: list[int], leading: bool, control: Control, renderer: _Renderer) -> Compilable:
    for i, token in enumerate(tokens):
        if (marker := control.ids.marker(token)) is not None:
            raise HTTPException(400, f"tokens[{i}]={token} is the id of {marker.value}: remove it")
    if not leading:
        return Compilable(Place.INTERIOR, tokens)
    first = await renderer.prompt_start("")
    if tokens[: len(first)] != first:
        raise HTTPException(
            400, f"tokens: expected a leading segment to begin with {first}, as every prompt does"
        )
    return Compilable(Place.PROMPT, tokens, bare_from=len(first))


def _checked_text(name: str, text: str, control: Control) -> str:
    if not text:
        raise HTTPException(400, f"{name} is empty")
    most = control.max_model_len * control.max_chars_per_token
    if len(text) > most:
        raise HTTPException(
            400, f"{name} has {len(text)} characters: expected at most {most}, as max_model_len allows"
        )
    if control.literal:
        return text
    texts = control.config.token_texts
    if (marker := texts.beginning_in(text, texts.sep)) is not None:
        raise HTTPException(
            400,
            f"{name} contains {marker[1]!r}, the text of {marker[0]}, or ends with its beginning: remove it",
        )
    if (found := ID_FORM.search(text)) is not None:
        raise HTTPException(400, f"{name} contains the segment id {found[1]!r}: remove it")
    return text


class _Renderer:
    """Renders minimal prompts, and returns their tokens cut at the separators."""

    def __init__(self, tokenization: ServingTokenization, request: Request, control: Control) -> None:
        self._tokenization, self._request, self._control = tokenization, request, control
        self._sep_id = control.ids.sep

    async def interior(self, text: str) -> list[int]:
        tokens = await self._tokens(lambda sep: {"prompt": f"{sep}{text}{sep}", "add_special_tokens": False})
        return tokens[1 : tokens.index(self._sep_id, 1)]

    async def prompt_start(self, text: str) -> list[int]:
        tokens = await self._tokens(lambda sep: {"prompt": text + sep})
        return tokens[: tokens.index(self._sep_id)]

    async def chat_start(self, role: str, text: str) -> list[int]:
        """Return the tokens before the first separator of a chat that begins with the message.

        The separator ends the text of a user's message; after any other message it begins the user's next."""

        def messages(sep: str) -> list[dict[str, str]]:
            if role == "user":
                return [{"role": role, "content": text + sep}]
            return [{"role": role, "content": text}, {"role": "user", "content": sep}]

        tokens = await self._tokens(lambda sep: {"messages": messages(sep)})
        if self._sep_id not in tokens:
            raise HTTPException(
                400,
                f"message: the chat template drops messages after a first {role} message; compile the "
                "segment with role 'interior'",
            )
        return tokens[: tokens.index(self._sep_id)]

    async def _tokens(self, body: Callable[[str], dict[str, Any]]) -> list[int]:
        """Render a prompt; ``body`` makes the body of a tokenise request from the text of a separator."""
        seal = Seal()
        public, written = body(self._control.config.token_texts.sep), body(self._control.texts(seal).sep)
        chat = "messages" in public
        what = (TokenizeChatRequest if chat else TokenizeCompletionRequest).model_validate(public)
        with carrying(rewriting(CHAT if chat else COMPLETIONS, public, written, seal)):
            answer = await self._tokenization.create_tokenize(what, self._request)
        if isinstance(answer, ErrorResponse):
            raise HTTPException(answer.error.code, answer.error.message)
        return answer.tokens
