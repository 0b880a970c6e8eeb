"""What a chat request is made of, and where that stands in the prompt that was rendered from it.

Templates write tools, documents and messages in any order and with anything in between.  Each piece is looked
for as it is, or as JSON writes it, behind the piece of its kind before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from json import JSONEncoder
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

MARKERS = ("cache_control", "prompt_cache_breakpoint")
"""Keys of content parts by which clients tell providers where a prompt may be cached up to."""
MAX_MISSED = 64
"""Pieces of one kind (tools, documents, messages) that may stand nowhere in the prompt; after so many the
rest of that kind is not looked for: each search reads the whole prompt."""
_MAX_TRIED = 3
"""So many tools are looked for in every form of JSON, until one is found."""
_TELLING = 16
"""Characters of a text that tells a tool from others."""
_NEAR = 512
"""Bytes between two fields of a tool."""
_LEADING = ("system", "developer")
_ANSWERING, _ASKING = "assistant", "user"
_RESULTS = ("tool", "function")
_JSON = tuple(
    JSONEncoder(ensure_ascii=False, indent=indent, separators=separators).encode
    for indent, separators in ((None, None), (4, None), (2, None), (None, (",", ":")))
)
_ASCII_JSON = JSONEncoder().encode


class Kind(Enum):
    TOOL = "tool"
    """A piece as it stands; neighbours that are too short alone are put together."""
    WHOLE = "whole"
    """A piece as it stands."""
    TEXT = "text"
    """A message that is one text, cut by patterns."""


class Block(NamedTuple):
    """Tokens ``[start, stop)``, the whole of which belong to one piece of a request.

    Only of a text, whose last piece is cut there in any case, the token that its last word ends in is one.
    """

    start: int
    stop: int
    kind: Kind
    leads: bool = False
    """A system message, and the first of all."""
    asks: bool = False
    """The question stands at its end."""
    sign: int = 0
    """A checksum of the text."""
    newest: int | None = None
    """The message that it is of, where that is the last of the user or stands behind it."""


@dataclass(frozen=True)
class Chat:
    """A chat request as it is rendered: what its client sent, of any type."""

    messages: Sequence[Any]
    tools: Any = None
    documents: Any = None


@dataclass(frozen=True)
class Structure:
    """``blocks``: in order and disjoint; ``counts``: pieces that were left out, and those moved."""

    blocks: list[Block]
    counts: Counter[str]


class _Piece(NamedTuple):
    """Bytes ``[first, last)`` of the rendered prompt."""

    first: int
    last: int
    kind: Kind
    system: bool = False
    asks: bool = False
    newest: int | None = None


def locate(chat: Chat, text: bytes, starts: Sequence[int], least: int) -> Structure:
    """Where the pieces of ``chat`` stand in its rendered ``text``.

    ``starts``: where each token begins, and at last the text's end.  Pieces of fewer than ``least`` bytes
    have fewer tokens, too, and are not looked for.
    """
    counts: Counter[str] = Counter()
    found: list[_Piece] = []
    for pieces in (
        _tools(_listed(chat.tools), _Search(text), counts),
        _documents(_listed(chat.documents), _Search(text), counts, least),
        _messages(chat.messages, _Search(text), counts, least),
    ):
        found += pieces
    found.sort(key=lambda piece: (piece.first, -piece.last))
    blocks: list[Block] = []
    after = 0
    for piece in found:
        if piece.first < after:
            counts["overlapping"] += 1
            continue
        after = piece.last
        start = bisect_left(starts, piece.first)
        if starts[start] > piece.first and not text[starts[start - 1] : piece.first].strip():
            start -= 1  # this token brings nothing but space before the piece
        stop = bisect_left(starts, piece.last) - (piece.kind is not Kind.TEXT)
        if start >= stop:
            counts["unaligned"] += 1
            continue
        counts["moved"] += starts[start] > piece.first
        sign = crc32(text[piece.first : piece.last]) if piece.kind is Kind.TOOL else 0
        blocks.append(
            Block(start, stop, piece.kind, piece.system and not blocks, piece.asks, sign, piece.newest)
        )
    return Structure(blocks, counts)


class _Search:
    """Finds pieces of one kind, each behind the one before."""

    def __init__(self, text: bytes) -> None:
        self._text, self._missed = text, 0
        self.after = 0
        """Where the next piece is looked for from."""
        self.form = 0
        """Which form was found last."""

    def find(self, forms: Iterable[str], most_missed: int = MAX_MISSED) -> tuple[int, int] | None:
        """Where the first of ``forms`` that stands anywhere does."""
        if self._missed >= most_missed:
            return None
        for i, form in enumerate(forms):
            wanted = _bytes(form)
            if wanted and (at := self._text.find(wanted, self.after)) >= 0:
                self.form, self.after = i, at + len(wanted)
                return at, self.after
        self._missed += 1
        return None

    def near(self, text: str, after: int) -> int:
        """Where ``text`` ends, if it stands close behind ``after``; else ``after``."""
        wanted = _bytes(text)
        at = self._text.find(wanted, after, after + len(wanted) + _NEAR)
        return after if at < 0 else at + len(wanted)

    def before(self, text: str, end: int, begin: int) -> int:
        """Where ``text`` stands close before ``end``, and not before ``begin``; -1: nowhere."""
        return self._text.rfind(_bytes(text), max(begin, end - _NEAR), end) if text else -1


def _tools(tools: list[Any], search: _Search, counts: Counter[str]) -> Iterator[_Piece]:
    """As JSON, each with or without what wraps the function, in the form in which the first one is found; or
    what templates make of their fields."""
    forms = [(form, key) for form in range(len(_JSON)) for key in (None, "function")]
    for tool in tools:
        most_missed = MAX_MISSED if len(forms) == 1 else _MAX_TRIED
        found = search.find((_as_json(tool, *form) for form in forms), most_missed)
        if found is not None:
            forms = [forms[search.form]] if len(forms) > 1 else forms
        elif (found := _by_fields(tool, search)) is None:
            counts["unlocated"] += 1
            continue
        yield _Piece(*found, Kind.TOOL)


def _as_json(tool: Any, form: int, key: str | None) -> str:
    """Empty for what is no tool."""
    value = tool if key is None else tool.get(key) if isinstance(tool, Mapping) else None
    try:
        return _written(msgspec.json.encode(value), form) if isinstance(value, Mapping) else ""
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""  # values that JSON does not have, or that hold themselves


@lru_cache(maxsize=1024)
def _written(value: bytes, form: int) -> str:
    """A value as templates write JSON, which takes ten times as long as to tell that it came before."""
    return _JSON[form](msgspec.json.decode(value))


def _by_fields(tool: Any, search: _Search) -> tuple[int, int] | None:
    """From the tool's name, or what is said of it, to the last of its texts that stands near by: no template
    writes more between two fields, and what closes the last one says nothing of the tool."""
    begin, texts = search.after, [text for text in _strings(tool) if len(text) >= _TELLING]
    found = next((place for text in texts[:2] if (place := search.find(_forms(text)))), None)
    if found is None:
        return None
    first, last = found
    for text in texts:
        last = search.near(text, last)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and (at := search.before(name, first, begin)) >= 0:
        first = at
    search.after = last
    return first, last


def _strings(value: Any, depth: int = 8) -> Iterator[str]:
    """The texts in it, in order; ``depth``: it may hold itself."""
    if isinstance(value, str):
        yield value.strip()
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(one, depth - 1)


def _documents(documents: list[Any], search: _Search, counts: Counter[str], least: int) -> Iterator[_Piece]:
    """The texts in them: what else they say, such as numbers and scores, is no piece."""
    for document in documents:
        values = document.values() if isinstance(document, Mapping) else [document]
        texts = [value.strip() for value in values if isinstance(value, str)]
        long = [text for text in texts if len(_bytes(text)) >= least]
        if not long:
            counts["short"] += 1
        begin = end = search.after
        for text in long:
            search.after = begin  # in any order, or one a part of another
            if (found := search.find(_forms(text))) is None:
                counts["unlocated"] += 1
            else:
                end = max(end, search.after)
                yield _Piece(*found, Kind.WHOLE)
        search.after = end


def _messages(messages: Sequence[Any], search: _Search, counts: Counter[str], least: int) -> Iterator[_Piece]:
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    asking = max((i for i, role in enumerate(roles) if role not in (None, _ANSWERING)), default=-1)
    newest = max((i for i, role in enumerate(roles) if role == _ASKING), default=asking)
    for i, message in enumerate(messages):
        parts = _parts(message) if roles[i] is not None else []
        for n, (text, marked) in enumerate(parts, start=1):
            asks = i == asking and n == len(parts)
            open_ended = not marked and roles[i] not in _RESULTS and (asks or len(parts) == 1)
            text = text.strip()
            if len(_bytes(text)) < least:
                counts["short"] += not (open_ended and asks)
            elif (found := search.find(_forms(text))) is None:
                counts["unlocated"] += 1
            else:
                kind = Kind.TEXT if open_ended else Kind.WHOLE
                of_newest = i if i >= newest else None
                yield _Piece(*found, kind, roles[i] in _LEADING, asks, of_newest)


def _parts(message: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The texts of a message's content, and whether a provider's marker ends them."""
    content = message.get("content")
    if isinstance(content, str):
        return [(content, False)]
    found = []
    for part in _listed(content):
        if isinstance(part, str):
            found.append((part, False))
        elif isinstance(part, Mapping) and isinstance(text := part.get("text", part.get("refusal")), str):
            found.append((text, any(part.get(marker) is not None for marker in MARKERS)))
    return found


def _forms(text: str) -> Iterator[str]:
    """How a template may write ``text``: as it is, or in JSON."""
    yield text
    for encode in (_JSON[0], _ASCII_JSON):
        if (escaped := encode(text)[1:-1]) != text:
            yield escaped


def _bytes(text: str) -> bytes:
    """Half of a surrogate pair is no character, so these bytes stand in no text of UTF-8."""
    return text.encode(errors="surrogatepass")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
