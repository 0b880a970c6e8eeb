"""Parts of a request that stand for primitives and compiled segments, beside its parts of text.

No text can be one: a caller who puts documents into parts of text, and these between them, need not know what
the documents say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .tokens import Marker

MARKER_PARTS = {f"hypic_{marker.value}": marker for marker in Marker}
"""``{"type": "hypic_sep"}`` is a separator; the other primitives likewise."""
SEGMENT_PART = "hypic_segment"
"""``{"type": "hypic_segment", "id": ID}`` is a compiled segment."""
PART_TYPES = (*MARKER_PARTS, SEGMENT_PART)


def is_part(value: object) -> bool:
    """Whether it is a part with a meaning of ours."""
    return isinstance(value, Mapping) and value.get("type") in PART_TYPES


def parts_of(prompt: object) -> Iterator[Mapping[str, Any]]:
    """Our parts in a completion's prompt, or in the contents of a chat's messages."""
    for one in prompt if isinstance(prompt, list) else ():
        content = one.get("content") if isinstance(one, Mapping) else None
        yield from filter(is_part, content if isinstance(content, list) else [one])
