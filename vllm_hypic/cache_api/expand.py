"""Puts what segment ids stand for in their place, in the bodies of completion and chat requests.

An id stands for its segment *with* the separators that make it one; separators that are there already are not
doubled, so ``system ID1 ID2 question`` is ``system SEP text1 SEP text2 SEP question``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .answers import Place
from .commands import Content
from .forms import ID_FORM, tokens_form

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
"""Routes in whose bodies ids are replaced."""


class MisplacedId(ValueError):
    """An id stands where its segment cannot be what it was compiled for; the message holds the id."""


def ids_in(path: str, body: Mapping[str, Any]) -> list[str]:
    """The distinct segment ids in the prompts or messages of a request, in order."""
    texts: list[str] = []

    def note(text: str, _: bool) -> str:
        texts.append(text)
        return text

    _rewrite(path, body, note)
    return list(dict.fromkeys(found[1] for text in texts for found in ID_FORM.finditer(text)))


def expand(path: str, body: Mapping[str, Any], contents: Mapping[str, Content], sep: str) -> dict[str, Any]:
    """The body with every id replaced; ``contents`` has them all, ``sep`` is the separator's text.

    Raises :class:`MisplacedId`.  Does not change ``body``.
    """
    for option in ("echo", "truncate_prompt_tokens"):
        tokens = [i for i in ids_in(path, body) if contents[i].text is None]
        if body.get(option) and tokens:
            raise MisplacedId(
                f"{option} cannot be combined with segment {tokens[0]!r}, which was compiled from tokens: "
                f"compile it from text, or leave {option} out"
            )
    chat = path == CHAT
    return _rewrite(path, body, lambda text, first: _expanded(text, contents, sep, chat=chat, first=first))


def _expanded(text: str, contents: Mapping[str, Content], sep: str, *, chat: bool, first: bool) -> str:
    """``first``: the text stands first in its prompt (or in its chat's first message)."""
    parts = ID_FORM.split(text)  # texts at even places, ids at odd ones
    out = parts[0]
    for segment_id, after in zip(parts[1::2], parts[2::2], strict=True):
        content = contents[segment_id]
        written = content.text if content.text is not None else tokens_form(content.token_ids)
        if content.place.leading:
            _check_leading(segment_id, content.place, chat=chat, at_start=first and not out)
        elif not out.endswith(sep):
            out += sep
        out += written
        # A system message is followed by what the template puts after it, and the segment goes on in there.
        open_end = content.place is Place.CHAT and not after
        if not open_end and not after.startswith(sep):
            out += sep
        out += after
    return out


def _check_leading(segment_id: str, place: Place, *, chat: bool, at_start: bool) -> None:
    if chat != (place is Place.CHAT):
        needed = "`message`" if chat else "`text` or `tokens`"
        raise MisplacedId(
            f"segment {segment_id!r} leads a {'completion prompt' if chat else 'chat'}: for this request "
            f"compile it from {needed}, or with role 'interior'"
        )
    if not at_start:
        where = "its first message" if chat else "its prompt"
        raise MisplacedId(
            f"segment {segment_id!r} was compiled as the leading one: it must be the first thing in {where}; "
            "for other places compile it with role 'interior'"
        )


def _rewrite(path: str, body: Mapping[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    """A copy of the body with each text that may hold ids replaced by ``change(text, stands first)``."""
    if path == COMPLETIONS:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return {**body, "prompt": change(prompt, True)}
        if isinstance(prompt, list):
            return {**body, "prompt": [change(p, True) if isinstance(p, str) else p for p in prompt]}
        return dict(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return dict(body)
    return {**body, "messages": list(_messages(messages, change))}


def _messages(messages: list[Any], change: Callable[[str, bool], str]) -> Iterator[Any]:
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield {**message, "content": change(content, i == 0)}
        elif isinstance(content, list):
            parts = [
                {**part, "text": change(part["text"], i == 0 and j == 0)}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for j, part in enumerate(content)
            ]
            yield {**message, "content": parts}
        else:
            yield message
