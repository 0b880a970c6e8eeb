"""SegmentingConfig: where prompts without separators are cut."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from ..primitives.places import pattern
from ..primitives.segmenter import SegmentMode
from .schema import Allowed, ConfigSection, Form, Natural, Positive, Text, options


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
    """``structure`` cuts a chat request at tools, documents and parts of messages, and other prompts as
    ``text`` does; ``text`` cuts where ``patterns`` match; ``cdc`` cuts at ends of lines and sentences that
    the text itself determines; ``off`` cuts at separators alone."""
    patterns: Annotated[tuple[Text, ...], AfterValidator(_known), Form("a list of names or patterns")] = (
        *("documents", "json-lines", "rules", "titles", "indents", "blank-lines"),
    )
    """Cuts of the mode ``text``, in order of preference: names of presets, or patterns of RE2. A group
    named ``segment`` is a segment; any other pattern cuts at its first group that matches, or else behind the
    match."""
    min_tokens: Positive = 128
    """A shorter piece is computed in the stream."""
    mean_tokens: Positive = 2048
    """Mean length of the pieces of the mode ``cdc``. Two cuts are more than half of this length apart."""
    query_tokens: Natural = 128
    """Tokens at the end of the last message in which the question is looked for. A piece that lies mostly in
    these tokens is computed in the stream. With 0 the end of the message is a piece like any other, except
    its last word."""
    newest_tokens: Natural = 512
    """The user's last message, and each later message, stays in the stream up to this length, so the end of a
    request is exact. A longer message is cut."""
    max_segments: Positive = 256
    """Most segments of one prompt; the rest of the prompt is computed in the stream."""
