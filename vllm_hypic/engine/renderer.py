"""Renderer mode ``hypic``: vLLM's own, which also tells what a chat request was made of.

Prompts are what they are without it.  Messages, tools and documents travel beside the rendered prompt, first
in the renderer's prompt and then in the engine's input, to ``InputProcessor.process_inputs``
(``patches/request_check.py``): in the request's own objects, so nothing is shared between requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.renderers.hf import HfRenderer

from ..patches import harmony_prompts
from ..primitives.structure import Chat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers.params import ChatParams

CHAT = "hypic_chat"
"""Key of the :class:`Chat` in prompts and engine inputs."""


class HypicRenderer(HfRenderer):
    """Overrides where messages become a prompt, and where a prompt becomes the engine's input.

    Chats of gpt-oss pass it by, so they are patched once it is made.
    """

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if config.model_config.hf_config.model_type == "gpt_oss":
            harmony_prompts.apply()

    def render_messages(self, messages: Any, params: ChatParams) -> Any:
        messages = _read(messages)
        conversation, prompt = super().render_messages(messages, params)
        return conversation, _with(prompt, messages, params)

    async def render_messages_async(self, messages: Any, params: ChatParams) -> Any:
        messages = _read(messages)
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, _with(prompt, messages, params)

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        chat = prompt.pop(CHAT, None)
        return _carrying(chat, super()._process_tokens(prompt, **kwargs))

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        chat = prompt.pop(CHAT, None)
        return _carrying(chat, await super()._process_tokens_async(prompt, **kwargs))


def _read(messages: Any) -> list[Any]:
    """The messages with contents that can be read twice: pydantic's may be iterators."""
    return [
        {**message, "content": list(content)}
        if isinstance(message, dict)
        and not isinstance(content := message.get("content"), (str, list, type(None)))
        else message
        for message in messages
    ]


def _with(prompt: Any, messages: list[Any], params: ChatParams) -> Any:
    asked = params.chat_template_kwargs
    prompt[CHAT] = Chat(messages, asked.get("tools"), asked.get("documents"))
    return prompt


def _carrying(chat: Chat | None, engine_input: Any) -> Any:
    if chat is not None:
        engine_input[CHAT] = chat
    return engine_input
