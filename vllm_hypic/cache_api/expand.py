"""Replaces ids and parts by their contents in the prompts of completion, chat and tokenise requests.

An id stands for its segment *with* the separators around the segment.  Separators that are there already are
not doubled, so ``system ID1 ID2 question`` is ``system SEP text1 SEP text2 SEP question``.  Ids, like
separators, stand in texts or among the parts of a prompt or content; with literal text only among the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..primitives.tokens import MARKER_PARTS, PART_TYPES, Marker, PrimitiveTexts, is_part
from .answers import Place
from .commands import Content
from .forms import ID, ID_FORM, Seal, id_form
from .rewriting import Rewriting

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
PATHS = (COMPLETIONS, CHAT, TOKENIZE)
"""Routes whose request bodies may hold ids and parts."""


class MisplacedId(ValueError):
    """An id or a part stands in a place that does not allow it; the message names the id or part."""


@dataclass(frozen=True)
class SegmentId:
    """An id of a segment, distinct in type from a text."""

    value: str


Piece = str | SegmentId | Marker
_Change = Callable[[list[Piece], bool], str]


def ids_in(path: str, body: Mapping[str, Any], *, literal: bool = False) -> list[str] | None:
    """Return the distinct segment ids in the prompts or messages of a request, in order.  A request without
    ids and parts gives ``None``.

    Raises :class:`MisplacedId` for parts that cannot be read.
    """
    found: list[SegmentId | Marker] = []

    def note(pieces: list[Piece], _: bool) -> str:
        found.extend(piece for piece in pieces if not isinstance(piece, str))
        return ""

    _rewrite(_is_chat(path, body), body, note, literal)
    ids = dict.fromkeys(piece.value for piece in found if isinstance(piece, SegmentId))
    return list(ids) if found else None


def shown(
    path: str, body: Mapping[str, Any], texts: PrimitiveTexts, *, literal: bool = False
) -> dict[str, Any]:
    """Return the body as vLLM reads it, with the public ``texts`` and the forms of ids in place of parts."""

    def text(piece: Piece) -> str:
        if isinstance(piece, str):
            return piece
        return texts[piece] if isinstance(piece, Marker) else id_form(piece.value)

    return _rewrite(_is_chat(path, body), body, lambda pieces, _: "".join(map(text, pieces)), literal)


def expand(
    path: str,
    body: Mapping[str, Any],
    contents: Mapping[str, Content],
    texts: PrimitiveTexts,
    seal: Seal,
    *,
    literal: bool = False,
) -> dict[str, Any]:
    """Return a copy of the body with every id and part replaced.

    ``contents`` holds all ids, ``texts`` the texts of primitives; ``seal`` writes tokens.  Raises
    :class:`MisplacedId`.
    """
    chat, hidden = _is_chat(path, body), list[str]()

    def written(pieces: list[Piece], first: bool) -> str:
        hidden.extend(_hidden(pieces, contents, literal))
        return _expanded(pieces, contents, texts, seal, chat=chat, first=first)

    changed = _rewrite(chat, body, written, literal)
    if body.get("truncate_prompt_tokens") and hidden:
        raise MisplacedId(
            f"truncate_prompt_tokens cannot be combined with {hidden[0]}: leave truncate_prompt_tokens out"
        )
    return changed


def rewriting(path: str, public: Mapping[str, Any], written: Mapping[str, Any], seal: Seal) -> Rewriting:
    """Return the rewriting from ``public`` (of :func:`shown`) to ``written`` (of :func:`expand`)."""
    if _is_chat(path, public):
        return Rewriting(True, public["messages"], written["messages"], seal)
    return Rewriting(False, _prompts(public["prompt"]), _prompts(written["prompt"]), seal)


def _prompts(value: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in (value if isinstance(value, list) else [value])]


def _hidden(pieces: list[Piece], contents: Mapping[str, Content], literal: bool) -> Iterator[str]:
    """Yield the pieces that are not written as their own text, each with the reason."""
    for piece in pieces:
        if isinstance(piece, SegmentId) and contents[piece.value].text is None:
            yield f"segment {piece.value!r}, which was compiled from tokens"
        elif literal and not isinstance(piece, str):
            yield "parts that mark separators and segments, while text is literal"


def _expanded(
    pieces: list[Piece],
    contents: Mapping[str, Content],
    texts: PrimitiveTexts,
    seal: Seal,
    *,
    chat: bool,
    first: bool,
) -> str:
    """Return the text of the pieces; ``first``: the pieces begin a prompt, or a chat's first message."""
    out, sep = "", texts.sep
    for piece, after in zip_longest(pieces, pieces[1:]):
        if isinstance(piece, str):
            out += piece
            continue
        if isinstance(piece, Marker):
            out += texts[piece]
            continue
        content = contents[piece.value]
        if content.text is not None and texts.contains(content.text):
            raise MisplacedId(
                f"segment {piece.value!r} was compiled while text was literal, and contains the text of a "
                "primitive: compile the segment from tokens"
            )
        if content.place.leading:
            _check_leading(piece.value, content.place, chat=chat, at_start=first and not out)
        elif not out.endswith(sep):
            out += sep
        out += content.text if content.text is not None else seal.tokens(content.token_ids)
        # The template puts text after a system message; this text belongs to the segment.
        open_end = content.place is Place.CHAT and not isinstance(after, str | Marker)
        closed = after is Marker.SEP or (isinstance(after, str) and after.startswith(sep))
        if not open_end and not closed:
            out += sep
    return out


def _check_leading(segment_id: str, place: Place, *, chat: bool, at_start: bool) -> None:
    if chat != (place is Place.CHAT):
        needed = "`message`" if chat else "`text` or `tokens`"
        raise MisplacedId(
            f"segment {segment_id!r} leads a {'completion prompt' if chat else 'chat'}: for this request "
            f"compile it from {needed}, or with role 'interior'"
        )
    if not at_start:
        where = "a chat's first message" if chat else "a prompt"
        raise MisplacedId(
            f"segment {segment_id!r} is a leading segment: expected at the start of {where}; "
            "for other places compile the segment with role 'interior'"
        )


def _is_chat(path: str, body: Mapping[str, Any]) -> bool:
    return path == CHAT or (path == TOKENIZE and "messages" in body)


def _rewrite(chat: bool, body: Mapping[str, Any], change: _Change, literal: bool) -> dict[str, Any]:
    """Return a copy of the body in which ``change(pieces, stands first)`` replaces each text, and each run of
    texts that parts of this API join."""
    name = "messages" if chat else "prompt"
    if name not in body:
        return dict(body)
    value = body[name]
    if not chat:
        if isinstance(value, list) and not any(map(is_part, value)):
            return {**body, name: [_prompt(p, change, literal) for p in value]}
        return {**body, name: _prompt(value, change, literal)}
    if not isinstance(value, list):
        return dict(body)
    return {**body, name: [_message(m, change, literal, i == 0) for i, m in enumerate(value)]}


def _prompt(prompt: Any, change: _Change, literal: bool) -> Any:
    if isinstance(prompt, str):
        return change(_pieces(prompt, literal), True)
    if isinstance(prompt, list) and any(map(is_part, prompt)):
        for i, part in enumerate(prompt):
            if not (is_part(part) or _is_text(part)):
                raise MisplacedId(
                    f"prompt[{i}]={part!r:.200}: expected a part of type text, {', '.join(PART_TYPES)}"
                )
        return change([piece for part in prompt for piece in _pieces(part, literal)], True)
    return prompt


def _message(message: Any, change: _Change, literal: bool, first: bool) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return {**message, "content": change(_pieces(content, literal), first)}
    if isinstance(content, list):
        return {**message, "content": list(_contents(content, change, literal, first))}
    return message


def _contents(parts: list[Any], change: _Change, literal: bool, first: bool) -> Iterator[Any]:
    """Yield the parts, with each run of texts that parts of this API join as one text.  A plain string is a
    part of type text."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    runs: list[list[Any]] = []
    for before, part in zip([None, *parts], parts, strict=False):
        joins = is_part(part) or is_part(before)
        if runs and joins and all(is_part(p) or _is_text(p) for p in (before, part)):
            runs[-1].append(part)
        else:
            runs.append([part])
    for i, run in enumerate(runs):
        if not (is_part(run[0]) or _is_text(run[0])):
            yield run[0]
            continue
        text = change([piece for part in run for piece in _pieces(part, literal)], first and i == 0)
        yield {**next((part for part in run if not is_part(part)), {"type": "text"}), "text": text}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _pieces(part: Any, literal: bool) -> list[Piece]:
    """Return the pieces of a text, a text part or a part of this API; an empty text has no pieces."""
    if is_part(part):
        if (marker := MARKER_PARTS.get(part["type"])) is not None:
            return [marker]
        segment_id = part.get("id")
        if not isinstance(segment_id, str) or not ID.fullmatch(segment_id):
            raise MisplacedId(f'part {part!r:.200}: expected the "id" of a compiled segment')
        return [SegmentId(segment_id)]
    text = part if isinstance(part, str) else part["text"]
    if literal:
        return [text] if text else []
    # The split puts texts at even indices, ids at odd indices.
    found = [SegmentId(p) if i % 2 else p for i, p in enumerate(ID_FORM.split(text))]
    return [p for p in found if p != ""]
