"""Parts of a request that stand for primitives and compiled segments, beside its parts of text.

No text can imitate such a part.  A caller who puts these parts between documents, given as parts of text,
need not check the documents' contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .tokens import Marker

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
