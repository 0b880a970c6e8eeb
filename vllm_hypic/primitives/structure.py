"""Find the pieces of a chat request in the prompt that a template rendered from it.

Templates write tools, documents and messages in any order, with any text between.  The search looks for each
piece as it is, or as JSON writes it, behind the previous piece of its kind.
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
"""Keys of content parts by which clients mark the end of a prompt's cacheable beginning for providers."""
MAX_MISSED = 64
"""Number of missed pieces of a kind (tools, documents, messages) that ends the search for that kind, because
each search reads the whole prompt."""
_MAX_TRIED = 3
"""Number of missed tools that ends the search in every form of JSON, if no tool was found before."""
_TELLING = 16
"""Least length, in characters, of a text that distinguishes a tool from other tools."""
_NEAR = 512
"""Most bytes between two fields of a tool."""
_KEPT_BYTES = 1 << 14
"""Length of the longest value whose JSON text is kept."""
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
    """A tool: a piece that is never cut; the segmenter joins short neighbours."""
    WHOLE = "whole"
    """A piece that is never cut and never joined."""
    TEXT = "text"
    """A message that is one text, cut by patterns."""


class Block(NamedTuple):
    """Tokens ``[start, stop)`` that lie as a whole in one piece of a request.

    A block of kind ``TEXT`` includes the token with the end of its last word, because a later cut drops it.
    """

    start: int
    stop: int
    kind: Kind
    leads: bool = False
    """The block is of a system message, and the first of all blocks."""
    asks: bool = False
    """The question stands at the block's end."""
    content_hash: int = 0
    """Checksum of a tool's text."""
    newest: int | None = None
    """Index of the block's message, if this is the user's last message or a later one."""


@dataclass(frozen=True)
class Chat:
    """A chat request as templates see it; a client may have sent values of any type."""

    messages: Sequence[Any]
    tools: Any = None
    documents: Any = None


@dataclass(frozen=True)
class Structure:
    """``blocks``: in order and disjoint; ``counts``: numbers of pieces left out, by reason, and moved."""

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
    """Find the pieces of ``chat`` in its rendered ``text``, and return the blocks of their tokens.

    ``starts``: byte offset of each token's beginning, and then of the text's end.  Documents and messages of
    fewer than ``least`` bytes have fewer than ``least`` tokens, too, and are not searched.
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
            start -= 1  # this token adds only space before the piece
        stop = bisect_left(starts, piece.last) - (piece.kind is not Kind.TEXT)
        if start >= stop:
            counts["unaligned"] += 1
            continue
        counts["moved"] += starts[start] > piece.first
        checksum = crc32(text[piece.first : piece.last]) if piece.kind is Kind.TOOL else 0
        blocks.append(
            Block(start, stop, piece.kind, piece.system and not blocks, piece.asks, checksum, piece.newest)
        )
    return Structure(blocks, counts)


class _Search:
    """Finds pieces of one kind in a text, each behind the previous piece."""

    def __init__(self, text: bytes) -> None:
        self._text, self._missed = text, 0
        self.after = 0
        """Byte offset at which the next search begins."""
        self.form = 0
        """Index of the form that was found last."""

    def find(self, forms: Iterable[str], most_missed: int = MAX_MISSED) -> tuple[int, int] | None:
        """Return the byte range of the first of ``forms`` that the text contains, or ``None``.

        A miss is counted; after ``most_missed`` misses the search ends at once."""
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
        """Return the end of ``text``, if it stands close behind ``after``; otherwise ``after``."""
        wanted = _bytes(text)
        at = self._text.find(wanted, after, after + len(wanted) + _NEAR)
        return after if at < 0 else at + len(wanted)

    def before(self, text: str, end: int, begin: int) -> int:
        """Return the beginning of ``text`` close before ``end`` and not before ``begin``; -1 for a miss."""
        return self._text.rfind(_bytes(text), max(begin, end - _NEAR), end) if text else -1


def _tools(tools: list[Any], search: _Search, counts: Counter[str]) -> Iterator[_Piece]:
    """Yield the pieces of ``tools``.  Each tool is searched as JSON, with or without the object around its
    function, in the form of the first found tool.  Otherwise its fields are searched one by one."""
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
    """Return ``tool``, or its field ``key``, as JSON of form ``form``; an empty text if it is no tool."""
    value = tool if key is None else tool.get(key) if isinstance(tool, Mapping) else None
    try:
        if not isinstance(value, Mapping):
            return ""
        encoded = msgspec.json.encode(value)
        return (_kept if len(encoded) <= _KEPT_BYTES else _written)(encoded, form)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""  # values that JSON does not have, or that hold themselves


def _written(value: bytes, form: int) -> str:
    """Return a value as templates write JSON."""
    return _JSON[form](msgspec.json.decode(value))


_kept = lru_cache(maxsize=1024)(_written)
"""Writing takes ten times as long as finding the kept text."""


def _by_fields(tool: Any, search: _Search) -> tuple[int, int] | None:
    """Return the byte range from the tool's name, or description, to the last of its texts that stand nearby.

    No template writes more than :data:`_NEAR` bytes between two fields, and the end of the last field carries
    no information about the tool."""
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
    """Yield the texts in ``value``, in order; ``depth`` limits the search, as a value may contain itself."""
    if isinstance(value, str):
        yield value.strip()
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(one, depth - 1)


def _documents(documents: list[Any], search: _Search, counts: Counter[str], least: int) -> Iterator[_Piece]:
    """Yield the texts in ``documents`` as pieces.  Other values, such as scores, are no pieces."""
    for document in documents:
        values = document.values() if isinstance(document, Mapping) else [document]
        texts = [value.strip() for value in values if isinstance(value, str)]
        long = [text for text in texts if len(_bytes(text)) >= least]
        if not long:
            counts["short"] += 1
        begin = end = search.after
        for text in long:
            search.after = begin  # texts may stand in any order, and inside each other
            if (found := search.find(_forms(text))) is None:
                counts["unlocated"] += 1
            else:
                end = max(end, search.after)
                yield _Piece(*found, Kind.WHOLE)
        search.after = end


def _messages(messages: Sequence[Any], search: _Search, counts: Counter[str], least: int) -> Iterator[_Piece]:
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    said_last = max((i for i, role in enumerate(roles) if role not in (None, _ANSWERING)), default=-1)
    newest = max((i for i, role in enumerate(roles) if role == _ASKING), default=said_last)
    # The ends of these messages are exact: the model answers the question, a later message, or goes on.
    asking = {newest, said_last, len(messages) - 1}
    for i, message in enumerate(messages):
        parts = _parts(message) if roles[i] is not None else []
        said = [n for n, (text, _) in enumerate(parts, start=1) if text.strip()]
        last, single = max(said, default=len(parts)), len(said) <= 1  # templates write nothing of empty parts
        for n, (text, marked) in enumerate(parts, start=1):
            asks = i in asking and n == last
            open_ended = not marked and roles[i] not in _RESULTS and (asks or single)
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
    """Return the texts of a message's content, each with whether a provider's marker ends it."""
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
    """Yield the forms in which a template may write ``text``: as it is, or in JSON."""
    yield text
    for encode in (_JSON[0], _ASCII_JSON):
        if (escaped := encode(text)[1:-1]) != text:
            yield escaped


def _bytes(text: str) -> bytes:
    """Encode ``text``.  Half of a surrogate pair is no character, so its bytes stand in no text of UTF-8."""
    return text.encode(errors="surrogatepass")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
