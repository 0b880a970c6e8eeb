"""The fixed text behind which records may be computed, as token ids of one model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

_DEFAULT = "context.txt"
"""Name of the plugin's context file, which lies beside this module."""


def context_text(path: str | None) -> str:
    """Return the text in the file at ``path``, or the plugin's own text for ``None``.

    Raises ``ValueError`` for a file that is empty or cannot be read.
    """
    if path is None:
        return resources.files(__package__).joinpath(_DEFAULT).read_text(encoding="utf-8").strip()
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"context_file={path!r}: {e}") from e
    if not text:
        raise ValueError(f"context_file={path!r}: expected a text, but the file is empty")
    return text


def context_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the token ids of ``text`` where a prompt's documents stand.

    That place is the beginning of the first user turn, without the turn's end.  Without a chat template, it
    is the beginning of the prompt."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        before, found, _ = rendered.partition(text)
        if found:
            return tuple(tokenizer.encode(before + text, add_special_tokens=False))
    return tuple(tokenizer.encode(text))
