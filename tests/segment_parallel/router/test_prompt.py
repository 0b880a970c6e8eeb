"""Which requests are worth tokenising, where text counts and where it is literal."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_hypic.segment_parallel.router.prompt import CHAT, COMPLETIONS, Whole, tokenize_request, whole_reason

SEP, SEP_ID = "<|hypic_sep|>", 100
SEP_PART, SEGMENT = {"type": "hypic_sep"}, {"type": "hypic_segment", "id": "x"}
TEXT = {"type": "text", "text": f"document{SEP}<|hypic_segment:x|>"}
IDS, NONE, UNSUPPORTED = Whole.SEGMENT_IDS, Whole.NO_SEGMENTS, Whole.UNSUPPORTED


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "marked", "literal"),
    [
        ({"prompt": f"a{SEP}b"}, None, NONE),
        ({"prompt": "a"}, NONE, NONE),
        ({"prompt": "<|hypic_segment:x|>"}, IDS, NONE),
        ({"prompt": [1, SEP_ID, 2]}, None, None),
        ({"prompt": [1, SEP_ID, 2], "prompt_logprobs": 1}, None, None),
        ({"prompt": [1, SEP_ID, 2], "echo": True, "logprobs": 1}, None, None),
        ({"prompt": [1, SEP_ID, 2], "n": 2}, UNSUPPORTED, UNSUPPORTED),
        ({"prompt": [1, 2]}, NONE, NONE),
        ({"prompt": [{"type": "text", "text": "a"}, SEP_PART]}, None, None),
        ({"prompt": [TEXT, SEP_PART]}, IDS, None),
        ({"prompt": [SEP_PART, SEGMENT]}, IDS, IDS),
        ({"prompt": ["a", SEP]}, UNSUPPORTED, UNSUPPORTED),
        (chat(SEP), None, NONE),
        (chat([TEXT]), IDS, NONE),
        (chat([TEXT, SEP_PART]), IDS, None),
        (chat([SEGMENT]), IDS, IDS),
        (chat([SEP_PART, {"type": "image_url"}]), UNSUPPORTED, UNSUPPORTED),
    ],
)
def test_text_counts_only_where_it_is_not_literal(
    body: dict[str, Any], marked: Whole | None, literal: Whole | None
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    assert whole_reason(path, body, ("m",), SEP, SEP_ID) is marked
    for known in (SEP, None):
        assert whole_reason(path, body, ("m",), known, SEP_ID, literal=True) is literal


def test_the_instance_is_asked_for_the_tokens_of_the_parts() -> None:
    for path, body in ((CHAT, chat([TEXT, SEP_PART])), (COMPLETIONS, {"prompt": [TEXT, SEP_PART]})):
        assert tokenize_request(path, body) == body
