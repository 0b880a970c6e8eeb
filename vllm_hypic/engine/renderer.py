"""Renderer mode ``hypic``: vLLM's renderer, which also passes on the messages of a chat request.

The mode leaves prompts unchanged.  Messages, tools and documents travel beside the rendered prompt, first in
the renderer's prompt and then in the engine's input, to ``InputProcessor.process_inputs``
(``patches/request_check.py``).  Each request carries them in its own objects, shared with no other request.

The renderer replaces parts and segment ids of a request, but its results show their public texts.  vLLM
builds answers and logs of a prompt from these public texts.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from vllm.renderers.hf import HfRenderer

from ..cache_api.forms import public_text
from ..cache_api.rewriting import current
from ..patches import harmony_prompts
from ..primitives.structure import Chat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers.params import ChatParams

CHAT = "hypic_chat"
"""Key of the :class:`Chat` in prompts and engine inputs."""


class HypicRenderer(HfRenderer):
    """Overrides vLLM's steps from messages to a prompt, and from a prompt to the engine's input.

    Requests with parts or ids also need the steps between overridden.  Chats of gpt-oss bypass the renderer,
    so the constructor patches vLLM for gpt-oss.
    """

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        submit = self._executor.submit
        # Threads must render and tokenise in the request's own context, where the request's seal is valid.
        self._executor.submit = lambda *call, **named: submit(copy_context().run, *call, **named)
        if config.model_config.hf_config.model_type == "gpt_oss":
            harmony_prompts.apply()

    async def render_chat_async(self, conversations: Any, *args: Any, **kwargs: Any) -> Any:
        if (rewriting := current(chat=True)) is None:
            return await super().render_chat_async(conversations, *args, **kwargs)
        [messages] = conversations
        with rewriting.seal:
            written = [rewriting.of(_read(messages))]
            said, inputs = await super().render_chat_async(written, *args, **kwargs)
            return self._public(said), inputs

    async def render_cmpl_async(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if (rewriting := current(chat=False)) is None:
            return await super().render_cmpl_async(prompts, *args, **kwargs)
        texts = len(prompts) - len(rewriting.public)  # vLLM puts texts behind prompt_embeds
        with rewriting.seal:
            written = [*prompts[:texts], *rewriting.of(prompts[texts:])]
            return await super().render_cmpl_async(written, *args, **kwargs)

    def render_messages(self, messages: Any, params: ChatParams) -> Any:
        messages = _read(messages)
        conversation, prompt = super().render_messages(messages, params)
        return conversation, _with(prompt, messages, params)

    async def render_messages_async(self, messages: Any, params: ChatParams) -> Any:
        messages = _read(messages)
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, _with(prompt, messages, params)

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        chat = self._taken(prompt)
        return _carrying(chat, super()._process_tokens(prompt, **kwargs))

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        chat = self._taken(prompt)
        return _carrying(chat, await super()._process_tokens_async(prompt, **kwargs))

    def _taken(self, prompt: Any) -> Chat | None:
        """Remove and return a tokenised prompt's chat; replace the prompt's text by its public text."""
        if isinstance(text := prompt.get("prompt"), str):
            prompt["prompt"] = self._public(text)
        return prompt.pop(CHAT, None)

    def _public(self, value: Any) -> Any:
        """Return ``value``, a text or nested lists and dictionaries of texts, with public texts only."""
        if isinstance(value, str):
            return public_text(value, self._decode)
        if isinstance(value, list):
            return [self._public(v) for v in value]
        return {k: self._public(v) for k, v in value.items()} if isinstance(value, dict) else value


def _read(messages: Any) -> list[Any]:
    """Return the messages with contents that can be read twice; pydantic's contents may be iterators."""
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
