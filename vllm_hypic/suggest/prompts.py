"""Turns recorded requests into prompts like a server's front end, with vLLM's own rendering and no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMError
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import has_non_text_content, load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine import EngineCoreRequest

from ..config.engine import HypicConfig
from ..connector.build import primitive_ids_of
from ..engine.activation import use_tokenizer
from ..engine.front_end import reason_not_to_cut
from ..engine.tokenizer import register_mode

EXPECTED = "expected a request with messages or prompt, by itself or as the body in a line of an OpenAI batch"


class LogError(ValueError):
    """A line of the log is no request, or a request that a server would refuse."""


@dataclass(frozen=True)
class RecordedPrompt:
    """A prompt of a request."""

    ids: list[int]
    engine_input: Any
    """Engine input in which segments are found: see :class:`..engine.segments.PromptSegments`."""
    salt: str | None
    may_reuse: bool
    """Whether the request asks only for features that prompts with segments have."""


def body_of(line: bytes) -> dict[str, Any]:
    """Return the request in a line.  Raises :class:`LogError`."""
    try:
        found = json.loads(line)
    except ValueError as e:
        raise LogError(f"the line is not JSON ({e}); {EXPECTED}") from e
    body = found.get("body", found) if isinstance(found, dict) else found
    if not isinstance(body, dict) or not ({"messages", "prompt"} & body.keys()):
        names = ", ".join(body) if isinstance(body, dict) else type(body).__name__
        raise LogError(f"found {names or 'nothing'}: {EXPECTED}")
    return body


class FrontEnd:
    """Renders requests as a server of ``model`` would, in a single thread.

    ``engine_args``: arguments of vLLM.  Raises :class:`~vllm_hypic.errors.ConfigError` for a model whose
    prompts cannot have segments.
    """

    def __init__(
        self, model: Path, config: HypicConfig, chat_template: str | None, engine_args: Mapping[str, Any]
    ) -> None:
        register_mode()
        model_config = EngineArgs(model=str(model), **engine_args).create_model_config()
        # The command computes nothing, so this machine need not support the quantisation.
        model_config.quantization = None
        use_tokenizer(model_config, config)
        self.model_config = model_config
        vllm_config = VllmConfig(model_config=model_config)
        self._renderer = renderer_from_config(vllm_config)
        self.tokenizer = self._renderer.get_tokenizer()
        self.primitives = primitive_ids_of(vllm_config, config)
        self._defaults = model_config.get_diff_sampling_param()
        self._online = OnlineRenderer(
            model_config,
            self._renderer,
            request_logger=None,
            chat_template=load_chat_template(chat_template),
            chat_template_content_format="auto",
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()
        self._renderer.shutdown()

    def prompts(self, body: dict[str, Any]) -> Iterator[RecordedPrompt]:
        """Yield the prompts of a request, or no prompt if the request has images or other parts than text.

        Raises :class:`LogError` if the server would refuse the request.
        """
        if has_non_text_content(body.get("messages")) or body.get("prompt_embeds") is not None:
            return
        if _has_parts(body.get("prompt")):
            return
        try:
            inputs, params = self._runner.run(self._render(body))
        except ValidationError as e:
            fault = e.errors(include_url=False)[0]
            raise LogError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from e
        except (VLLMError, ValueError, TypeError) as e:
            raise LogError(str(e)) from e
        for engine_input in inputs:
            ids, salt = engine_input["prompt_token_ids"], engine_input.get("cache_salt")
            asked = EngineCoreRequest("", ids, None, params, None, 0.0, None, salt, None)
            yield RecordedPrompt(ids, engine_input, salt, reason_not_to_cut(asked, self.primitives) is None)

    async def _render(self, body: dict[str, Any]) -> tuple[list[Any], Any]:
        """Return the engine's inputs and the sampling parameters."""
        request: Any
        if "messages" in body:
            request = ChatCompletionRequest.model_validate(body)
            request.tool_choice = (
                "none"  # prompts do not depend on tool_choice, and only servers have parsers of calls
            )
            rendered: Any = await self._online.render_chat(request)
            inputs = rendered[1] if isinstance(rendered, tuple) else rendered
        else:
            request = CompletionRequest.model_validate(body)
            inputs = await self._online.render_completion(request)
        if not isinstance(inputs, list):
            raise LogError(inputs.error.message)
        for engine_input in inputs:
            self._renderer.validate_token_ids(engine_input["prompt_token_ids"])
        return inputs, request.to_sampling_params(1, self._defaults)


def _has_parts(prompt: Any) -> bool:
    """Whether a completion's prompt, or a prompt of its batch, is a list of parts."""
    return isinstance(prompt, list) and any(isinstance(item, dict) or _has_parts(item) for item in prompt)
