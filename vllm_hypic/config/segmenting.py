"""SegmentingConfig: where prompts without separators are cut."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from ..primitives.places import PRESETS
from .schema import Allowed, ConfigSection, Natural, Positive, Text, options

Mode = Literal["off", "text", "cdc"]
MODES: tuple[str, ...] = get_args(Mode)


def _known(patterns: tuple[str, ...]) -> tuple[str, ...]:
    import re2

    for pattern in patterns:
        try:
            re2.compile(PRESETS.get(pattern, pattern))
        except re2.error as e:
            raise ValueError(
                f"segment.patterns: {pattern!r} is neither one of {', '.join(PRESETS)} nor a pattern of "
                f"RE2: {e}"
            ) from e
    return patterns


@options
class SegmentingConfig(ConfigSection):
    """The section ``segment`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    section = "segment"

    mode: Annotated[Mode, Allowed()] = "off"
    """``text``: cut where ``patterns`` match; ``cdc``: at ends of lines and sentences that the text itself
    chooses; ``off``: separators alone cut."""
    patterns: Annotated[tuple[Text, ...], AfterValidator(_known)] = ("blank-lines", "documents")
    """Of mode ``text``: names of presets, or patterns of RE2.  The cut is at the pattern's first group, if it
    has one, otherwise behind the match."""
    min_tokens: Positive = 128
    """Pieces that are shorter are computed in the stream."""
    mean_tokens: Positive = 2048
    """Of mode ``cdc``: mean length of pieces; none is shorter than half of it."""
    query_tokens: Natural = 128
    """So many tokens at the end of the last message, or of the prompt, belong to no segment: there stands
    what is asked."""
    max_segments: Positive = 256
    """Segments of one prompt; what comes behind them is computed in the stream."""
