"""SegmentingConfig: where prompts without separators are cut."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from ..primitives.places import pattern
from ..primitives.segmenter import SegmentMode
from .schema import Allowed, ConfigSection, Natural, Positive, Text, options


def _known(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for name in patterns:
        try:
            pattern(name)
        except ValueError as e:
            raise ValueError(f"segment.patterns: {e}") from e
    return patterns


@options
class SegmentingConfig(ConfigSection):
    """The section ``segment`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    section = "segment"

    mode: Annotated[SegmentMode, Allowed()] = "off"
    """``structure``: tools, documents and parts of messages of a chat request, other prompts as by ``text``;
    ``text``: cut where ``patterns`` match; ``cdc``: at ends of lines and sentences that the text itself
    chooses; ``off``: separators alone cut."""
    patterns: Annotated[tuple[Text, ...], AfterValidator(_known)] = (
        *("documents", "json-lines", "rules", "titles", "indents", "blank-lines"),
    )
    """What mode ``text`` looks for, the best places first: names of presets, or patterns of RE2.  A group
    ``segment`` is a segment; others cut at their first group that matches, or else behind the match."""
    min_tokens: Positive = 128
    """Pieces that are shorter are computed in the stream."""
    mean_tokens: Positive = 2048
    """Mean length of the pieces that mode ``cdc`` makes; two cuts are further apart than half of it."""
    query_tokens: Natural = 128
    """The question is looked for in so many tokens at the end of the last message: a piece most of which lies
    there is computed in the stream.  0: there is none, and the message's end is a piece like others."""
    newest_tokens: Natural = 512
    """The user's last message, and each later message, stays in the stream up to this length.  The end of a
    request is therefore exact.  Longer messages are cut."""
    max_segments: Positive = 256
    """Segments of one prompt; what comes behind them is computed in the stream."""
