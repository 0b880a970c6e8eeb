"""Finds the arguments that vLLM would give its engine for the body of a chat or completion request.

vLLM's own serving object handles the request, with a stand-in engine that only notes the call.  Templates,
tools, adapters, defaults and refusals are thus those of a real request.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from .control import Control
from .expand import CHAT, COMPLETIONS, MisplacedId
from .middleware import replaced
from .rewriting import carrying


@dataclass(frozen=True)
class Asked:
    """Arguments of a call of the engine's ``generate``; ``prompt`` is an engine input."""

    prompt: Any
    params: SamplingParams
    lora: LoRARequest | None


class _Heard(Exception):
    """Ends the handling of a request at the call of the engine."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked


class _Listener:
    """The engine with a :meth:`generate` that raises :class:`_Heard`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        raise _Heard(Asked(prompt, params, options.get("lora_request")))


async def asked(body: dict[str, Any], control: Control, request: Request) -> Asked:
    """Return the arguments that vLLM would give the engine for ``body``.

    Raises ``HTTPException``, :class:`.control.CommandFailed` and vLLM's own errors for refused requests."""
    chat, state = "messages" in body, request.app.state
    if chat == ("prompt" in body):
        raise HTTPException(
            400, "expected the body of a request with either messages (a chat) or a prompt (a completion)"
        )
    try:
        body, carried = await replaced(CHAT if chat else COMPLETIONS, body, control)
    except MisplacedId as e:
        raise HTTPException(400, str(e)) from e
    wanted = _validated(ChatCompletionRequest if chat else CompletionRequest, body)
    serving = copy.copy(state.openai_serving_chat if chat else state.openai_serving_completion)
    serving.engine_client = _Listener(serving.engine_client)
    try:
        with carrying(carried):
            refused = await (serving.create_chat_completion if chat else serving.create_completion)(
                wanted, request
            )
    except _Heard as heard:
        if "prompt_token_ids" not in heard.asked.prompt:
            raise HTTPException(400, "prompt_embeds are not explained: they have no segments") from None
        return heard.asked
    raise HTTPException(refused.error.code, refused.error.message)


def _validated(kind: type[ChatCompletionRequest | CompletionRequest], body: dict[str, Any]) -> Any:
    try:
        wanted = kind.model_validate(body)
    except ValidationError as e:
        raise RequestValidationError(
            [{**error, "loc": ("body", *error["loc"])} for error in e.errors()], body=body
        ) from e
    if wanted.use_beam_search:
        raise HTTPException(400, "use_beam_search=true: expected a request without beam search")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise HTTPException(400, f"prompt: expected one prompt, got {len(prompt)}")
    return wanted
