"""Puts primitives into prompts of gpt-oss, whose chats the package ``openai_harmony`` writes and tokenises.

Harmony does not use the model's tokenizer, so this module puts primitives into harmony's finished prompt.
Contents without primitives keep their tokens.  In other contents, harmony tokenises each piece alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from openai_harmony import DeveloperContent, Message, SystemContent, TextContent
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import auto_drop_analysis_messages, get_encoding

from ..cache_api.rewriting import current
from ..primitives.structure import Chat
from ..primitives.tokens import Marker, parts_of
from .front_end import RequestRefused

if TYPE_CHECKING:
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

    from .tokenizer import HypicTokenizer


def refuse_parts(messages: object) -> None:
    """Raise :class:`.front_end.RequestRefused` if ``messages`` hold parts of the plugin's types.
    vLLM would read such parts as empty texts."""
    if (part := next(parts_of(messages), None)) is not None:
        raise RequestRefused(
            f"part {dict(part)!r:.200}: expected text; separators and segments are allowed in messages of "
            "/v1/chat/completions, on a server started with VLLM_PLUGINS=hypic,hypic_cache"
        )


def is_cut(said: object, tokenizer: HypicTokenizer) -> bool:
    """Return whether a chat has primitives, parts or segment ids; ``said``: texts in messages and tools."""
    return current(chat=True) is not None or tokenizer.has_primitives(said)


@contextmanager
def written(request: ChatCompletionRequest) -> Iterator[ChatCompletionRequest]:
    """Yield the request with its parts and segment ids replaced by forms that are valid only inside."""
    if (rewriting := current(chat=True)) is None:
        yield request
        return
    with rewriting.seal:
        yield request.model_copy(update={"messages": rewriting.of(request.messages)})


def cut(messages: Sequence[Message], ids: list[int], tokenizer: HypicTokenizer) -> list[int]:
    """Return ``ids``, harmony's tokens of ``messages``, with primitives and written tokens for their texts.

    Raises :class:`.front_end.RequestRefused` if such texts stand outside contents or harmony alters contents,
    and ``ValueError`` for segment ids that no token list has replaced.
    """
    if not tokenizer.has_primitives([message.to_dict() for message in messages]):
        return ids
    encode = partial(get_encoding().encode, disallowed_special=())
    shown = auto_drop_analysis_messages(list(messages))
    found: list[int] = []
    after = 0
    for message, (start, stop) in zip(shown, _contents(ids, len(shown)), strict=True):
        header = {name: value for name, value in message.to_dict().items() if name != "content"}
        if tokenizer.has_primitives(header):
            raise RequestRefused(
                f"message {header!r:.200}: separators, other primitives and segment ids are allowed in "
                "contents, not in names"
            )
        text = get_encoding().decode(ids[start:stop])
        if tokenizer.has_primitives(text):
            parts = [content.text for content in message.content if isinstance(content, TextContent)]
            parts = parts or [text]  # instructions and tools are one text
            if "".join(parts) != text:
                raise RequestRefused("harmony alters the text of messages: remove separators and segment ids")
            found += ids[after:start]
            for piece in (piece for part in parts for piece in tokenizer.pieces_of(part)):
                if isinstance(piece, str):
                    found += encode(piece)
                else:
                    found += [tokenizer.hypic_ids[piece]] if isinstance(piece, Marker) else piece.ids
            after = stop
    return found + ids[after:]


def _contents(ids: list[int], n_messages: int) -> Iterator[tuple[int, int]]:
    """Yield the first index and the end of each message's content, which lies between two special tokens."""
    harmony = get_encoding()
    [before] = harmony.encode("<|message|>", allowed_special="all")
    if ids.count(before) != n_messages:
        raise RequestRefused(f"harmony writes {n_messages} messages as {ids.count(before)}: drop separators")
    stop = 0
    for _ in range(n_messages):
        start = stop = ids.index(before, stop) + 1
        while not harmony.is_special_token(ids[stop]):
            stop += 1
        yield start, stop


def chat_of(request: ChatCompletionRequest, *, with_tools: bool) -> Chat:
    """Return the chat that harmony was asked to write."""
    tools = request.tools if with_tools else None
    return Chat(request.messages, [tool.model_dump() for tool in tools or ()])


def chat_in(messages: Sequence[Message]) -> Chat:
    """Return the chat behind ``messages``, without the texts that harmony itself adds."""
    tools: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for message in messages:
        texts: list[str] = []
        for content in message.content:
            if isinstance(content, TextContent):
                texts.append(content.text)
            elif isinstance(content, SystemContent):
                own = SystemContent.new().model_identity or ""
                texts.append((content.model_identity or "").removeprefix(own))
            elif isinstance(content, DeveloperContent):
                texts.append(content.instructions or "")
                spaces = (content.tools or {}).values()
                tools += [tool.model_dump() for space in spaces for tool in space.tools]
        said.append({"role": message.author.role.value, "content": [text for text in texts if text]})
    return Chat(said, tools)


def as_chat(request: TokenizeChatRequest) -> ChatCompletionRequest:
    """Return the chat request whose prompt ``request`` asks to tokenise."""
    return ChatCompletionRequest(
        messages=request.messages,
        tools=request.tools,
        reasoning_effort=(request.chat_template_kwargs or {}).get("reasoning_effort"),
    )
