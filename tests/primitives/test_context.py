"""The fixed text that records are computed behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from vllm_hypic.primitives.context import context_text, context_tokens

from .conftest import gpt2

CHAT = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}[end]\n{% endfor %}"


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))
    tokenizer.chat_template = template
    return tokenizer


def test_the_plugin_brings_a_text() -> None:
    text = context_text(None)
    assert len(text) > 1000 and text == text.strip()


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "context.txt"
    path.write_text("  One page.\n", encoding="utf-8")
    assert context_text(str(path)) == "One page."
    path.write_text(" \n")
    with pytest.raises(ValueError, match="expected a text, found nothing"):
        context_text(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="context_file="):
        context_text(str(path))


def test_behind_a_chat_template_it_begins_the_user_turn_and_does_not_end_it() -> None:
    tokenizer = tokenizer_with(CHAT)
    assert tokenizer.decode(context_tokens(tokenizer, "One page.")) == "[user]\nOne page."


def test_without_a_usable_template_it_begins_the_prompt() -> None:
    plain = tokenizer_with(None)
    assert context_tokens(plain, "One page.") == tuple(plain.encode("One page."))
    shouting = tokenizer_with("{{ messages[0]['content'] | upper }}")
    assert context_tokens(shouting, "One page.") == tuple(plain.encode("One page."))
