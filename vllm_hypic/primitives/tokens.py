"""The three token primitives: text forms, ids, parts of a request, and cuts of texts or ids at them.

No text can imitate a part.  A caller who puts parts between documents, given as parts of text, need not check
the documents' contents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import lru_cache
from itertools import permutations
from typing import Any

NO_TOKENIZER = (
    "no tokenizer is loaded (skip_tokenizer_init), so the ids of the token primitives are unknown; give ids "
    'in the config: --additional-config \'{"hypic": {"token_ids": {"sep": ..., "pdep": ..., "pad": ...}}}\''
)


class Marker(Enum):
    """A primitive, by its role."""

    SEP = "sep"
    """Starts a new position-independent segment."""
    PDEP = "pdep"
    """From here to the next separator, tokens depend on the whole prompt before them."""
    PAD = "pad"
    """Takes one logical position and has no content."""


@dataclass(frozen=True)
class PrimitiveTexts:
    """Text forms of the primitives, as they stand in prompt strings and chat messages."""

    sep: str = "<|hypic_sep|>"
    """Text of the separator, which ends one segment and starts the next."""
    pdep: str = "<|hypic_pdep|>"
    """Text of PDep: tokens from here to the next separator depend on the whole prompt before them."""
    pad: str = "<|hypic_pad|>"
    """Text of padding, which takes one position and has no content."""
    literal: bool = False
    """With true, ``sep``, ``pdep`` and ``pad`` are ordinary text in prompts, and only token ids or parts of a
    request mark segments."""

    def __post_init__(self) -> None:
        if not isinstance(self.literal, bool):
            raise ValueError(f"literal={self.literal!r}: expected true or false")
        for name, text in self.items():
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name}={text!r}: expected a non-empty string")
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise ValueError(f"{name}={text!r}: not valid Unicode text ({e.reason})") from e
        for (name, text), (other, container) in permutations(self.items(), 2):
            if text == container:
                raise ValueError(f"{name}={text!r}: {other} has the same text; the texts must differ")
            if text in container:
                raise ValueError(
                    f"{name}={text!r}: is part of {other}={container!r}; no text may contain another"
                )

    def __getitem__(self, marker: Marker) -> str:
        return str(getattr(self, marker.value))

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield the field's name and the text of each primitive."""
        return ((m.value, getattr(self, m.value)) for m in Marker)

    def contains(self, text: str) -> bool:
        """Whether any primitive stands in ``text``."""
        return self.sep in text or self.pdep in text or self.pad in text

    def beginning_in(self, text: str, behind: str = "") -> tuple[str, str] | None:
        """Return the name and the text of a primitive that begins in ``text``, and may end in the text
        ``behind`` it; ``None`` without such a primitive."""
        whole = text + behind
        return next(((n, marker) for n, marker in self.items() if 0 <= whole.find(marker) < len(text)), None)

    def to_json(self) -> str:
        """Return one line of JSON: the inverse of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_mapping(texts: Mapping[str, Any]) -> PrimitiveTexts:
        """Build from plain data.  Missing names keep their defaults; unknown names raise ``ValueError``."""
        known = [f.name for f in fields(PrimitiveTexts)]
        if not isinstance(texts, Mapping):
            raise ValueError(f"token primitives: expected an object with {', '.join(known)}, got {texts!r}")
        if unknown := sorted(set(texts) - set(known), key=str):
            raise ValueError(f"token primitives: unknown name {unknown[0]!r}; expected {', '.join(known)}")
        return PrimitiveTexts(**texts)

    @staticmethod
    def from_json(text: str) -> PrimitiveTexts:
        """Parse ``{"sep": ..., "pdep": ..., "pad": ...}``; raises :class:`ValueError` naming the fault."""
        try:
            texts = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"token primitives: {text!r} is not JSON ({e})") from e
        return PrimitiveTexts.from_mapping(texts)


@dataclass(frozen=True)
class PrimitiveIds:
    """Token ids of the primitives in one tokenizer.  They are stripped before the model."""

    sep: int
    """Token id of the separator."""
    pdep: int
    """Token id of PDep."""
    pad: int
    """Token id of padding."""

    def __post_init__(self) -> None:
        ids = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, token in ids.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"{name}={token!r}: expected a token id, an integer >= 0")
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"token ids of the primitives must differ: {ids}")

    def __getitem__(self, marker: Marker) -> int:
        return int(getattr(self, marker.value))

    def __iter__(self) -> Iterator[int]:
        return iter((self.sep, self.pdep, self.pad))

    def marker(self, token: int) -> Marker | None:
        """Return the primitive with the id ``token``, or ``None``."""
        return _markers_by_id(self).get(token)

    def contains(self, ids: Sequence[int]) -> bool:
        """Whether any primitive stands in ``ids``."""
        return not {self.sep, self.pdep, self.pad}.isdisjoint(ids)


def primitive_ids(tokenizer: object) -> PrimitiveIds:
    """Return the primitives' ids in ``tokenizer``.  If it has no ids, ``ValueError`` names the way out."""
    if isinstance(ids := getattr(tokenizer, "hypic_ids", None), PrimitiveIds):
        return ids
    if tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    raise ValueError(
        f"{type(tokenizer).__name__} has no token primitives; load the model with --tokenizer-mode hypic "
        "(the default with --attention-backend hypic, where the mode was auto or hf)"
    )


def split_text(text: str, texts: PrimitiveTexts) -> list[str | Marker]:
    """Cut ``text`` at the primitives.

    The joined parts, with each marker's text in its place, are ``text`` again.  No part is an empty
    string, and two texts never stand side by side.  The leftmost of overlapping primitives wins.
    """
    pattern, markers = _pattern(texts)
    parts: list[str | Marker] = []
    # Captured separators stand at the odd places of re.split's result.
    for i, part in enumerate(pattern.split(text)):
        if i % 2:
            parts.append(markers[part])
        elif part:
            parts.append(part)
    return parts


def split_ids(ids: Sequence[int], primitives: PrimitiveIds) -> list[list[int] | Marker]:
    """Cut token ids at the primitives, as :func:`split_text` cuts a text."""
    by_id = _markers_by_id(primitives)
    parts: list[list[int] | Marker] = []
    run: list[int] = []
    for token in ids:
        marker = by_id.get(token)
        if marker is None:
            run.append(token)
            continue
        if run:
            parts.append(run)
            run = []
        parts.append(marker)
    if run:
        parts.append(run)
    return parts


@lru_cache(maxsize=16)
def _pattern(texts: PrimitiveTexts) -> tuple[re.Pattern[str], dict[str, Marker]]:
    # No text is part of another, so the order of the alternatives does not matter.
    pattern = re.compile("(" + "|".join(re.escape(texts[m]) for m in Marker) + ")")
    return pattern, {texts[m]: m for m in Marker}


@lru_cache(maxsize=16)
def _markers_by_id(ids: PrimitiveIds) -> dict[int, Marker]:
    return {ids[m]: m for m in Marker}


MARKER_PARTS = {f"hypic_{marker.value}": marker for marker in Marker}
"""Primitives by type of part: ``{"type": "hypic_sep"}`` is a separator."""
SEGMENT_PART = "hypic_segment"
"""``{"type": "hypic_segment", "id": ID}`` is a compiled segment."""
PART_TYPES = (*MARKER_PARTS, SEGMENT_PART)


def is_part(value: object) -> bool:
    """Whether ``value`` is a part that stands for a primitive or a compiled segment."""
    return isinstance(value, Mapping) and value.get("type") in PART_TYPES


def parts_of(prompt: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of :data:`PART_TYPES` in a completion's prompt, or in the contents of chat messages."""
    for one in prompt if isinstance(prompt, list) else ():
        content = one.get("content") if isinstance(one, Mapping) else None
        yield from filter(is_part, content if isinstance(content, list) else [one])
