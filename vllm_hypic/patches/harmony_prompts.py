"""Patch: vLLM cuts chats of gpt-oss at token primitives, as other chats.

Target: ``vllm.renderers.online_renderer.OnlineRenderer``: ``_make_request_with_harmony``,
``_render_responses_with_harmony``, ``render_responses_harmony_messages`` and ``preprocess_chat``.
Why: for gpt-oss, vLLM bypasses the renderer and its tokenizer, so vLLM would read separators as text and drop
parts.  The chat's messages travel with the prompt, as in ``engine/renderer.py``.  ``/tokenize`` renders by a
template, which writes different prompts; with the patch, chats with primitives get the served prompt.
Until: vLLM lets a renderer write and tokenise prompts of gpt-oss.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch, which ignores engines without HypicTokenizer; repeated calls change nothing."""
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
    from vllm.renderers.online_renderer import OnlineRenderer as Renderer

    from ..engine.harmony import as_chat, chat_in, chat_of, cut, is_cut, refuse_parts, written
    from ..engine.renderer import CHAT
    from ..engine.tokenizer import HypicTokenizer

    def is_ours(self: Renderer) -> bool:
        return isinstance(self.renderer.tokenizer, HypicTokenizer)

    @replaces(Renderer, Renderer._make_request_with_harmony, "self", "request", "should_include_tools")
    def of_chat(stock: Any, self: Renderer, request: Any, should_include_tools: bool = True) -> Any:
        if not is_ours(self):
            return stock(self, request, should_include_tools)
        refuse_parts(request.messages)
        messages, [prompt] = stock(self, request, should_include_tools)
        if messages:  # a prompt that came as tokens has no messages
            with written(request) as asked:
                said, ids = messages, prompt["prompt_token_ids"]
                if asked is not request:
                    said, [rewritten] = stock(self, asked, should_include_tools)
                    ids = rewritten["prompt_token_ids"]
                prompt["prompt_token_ids"] = cut(said, ids, self.renderer.tokenizer)
            prompt[CHAT] = chat_of(request, with_tools=should_include_tools)
        return messages, [prompt]

    @replaces(Renderer, Renderer._render_responses_with_harmony, "self", "request")
    def of_response(stock: Any, self: Renderer, request: Any, **kwargs: Any) -> Any:
        if is_ours(self):
            refuse_parts(request.input)
            refuse_parts(request.previous_input_messages)
        return stock(self, request, **kwargs)

    @replaces(
        Renderer, Renderer.render_responses_harmony_messages, "self", "messages", "cache_salt", "tok_params"
    )
    def of_messages(
        stock: Any, self: Renderer, messages: Any, *, cache_salt: str | None, tok_params: Any = None
    ) -> Any:
        if not is_ours(self):
            return stock(self, messages, cache_salt=cache_salt, tok_params=tok_params)
        prompt = stock(self, messages, cache_salt=cache_salt)
        prompt["prompt_token_ids"] = cut(messages, prompt["prompt_token_ids"], self.renderer.tokenizer)
        prompt[CHAT] = chat_in(messages)
        if tok_params is not None:  # the limits apply to the cut prompt
            tok_params.apply_post_tokenization(self.renderer.tokenizer, prompt)
        return prompt

    @replaces(Renderer, Renderer.preprocess_chat, "self", "request", "messages")
    async def of_tokenize(
        stock: Any, self: Renderer, request: Any, messages: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.use_harmony and is_ours(self) and isinstance(request, TokenizeChatRequest):
            tools = [tool.model_dump() for tool in request.tools or ()]
            if is_cut((messages, tools), self.renderer.tokenizer):
                with_tools = request.tools is not None
                return self._make_request_with_harmony(as_chat(request), should_include_tools=with_tools)
        return await stock(self, request, messages, *args, **kwargs)
