"""The fixed text that records may be computed behind, as one model's token ids."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

_DEFAULT = "context.txt"
"""Lies beside this module."""


def context_text(path: str | None) -> str:
    """The text in the file at ``path``; ``None``: the one that comes with the plugin.

    Raises ``ValueError`` for a file that cannot be read or holds nothing.
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
    """Token ids of ``text`` as a prompt's documents stand: at the beginning of the first user turn, whose end
    is left out, or, without a chat template, at the beginning of the prompt."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        before, found, _ = rendered.partition(text)
        if found:
            return tuple(tokenizer.encode(before + text, add_special_tokens=False))
    return tuple(tokenizer.encode(text))
