"""Presets of mode ``text`` on the shapes that prompts with documents have, by default and together."""

from __future__ import annotations

import pytest

from vllm_hypic.config.segmenting import SegmentingConfig

from .test_segmenter import Chat, prose

PATTERNS = SegmentingConfig().patterns
ORDERS = ([0, 1, 2, 3], [2, 0, 3, 1])


@pytest.fixture(params=["qwen", "llama3", "llama-legacy"])
def chat(request: pytest.FixtureRequest, tokenizer_dirs) -> Chat:
    return Chat(tokenizer_dirs[request.param], PATTERNS)


def paragraphs(i: int) -> str:
    """A document of short paragraphs: none is long enough to be found by itself."""
    return "\n\n".join(prose((i, j), 20) for j in range(6))


def dashes(documents: list[str]) -> str:
    line = "-" * 21
    return (
        f"Context information is below.\n{line}\n"
        + "\n\n".join(documents)
        + f"\n{line}\nQuery: Why?\nAnswer: "
    )


def tagged(documents: list[str]) -> str:
    found = [
        f'<document index="{n}">\n<source>{d[:9]}.txt</source>\n{d}\n</document>'
        for n, d in enumerate(documents)
    ]
    return "\n".join(["<documents>", *found, "</documents>", "", "Why?"])


def wrapped(documents: list[str]) -> str:
    return "<context>\n" + "\n\n".join(documents) + "\n</context>\n\nWhy?"


def numbered(documents: list[str]) -> str:
    return "\n".join([*(f"Document [{n}]: {d}" for n, d in enumerate(documents)), "", "Question: Why?"])


def indented(documents: list[str]) -> str:
    lines = "".join(f"\n            {d}\n        " for d in documents)
    return f"\n        Given these:\n        {lines}\n\n        Question: Why?\n        Answer:\n        "


def headed(documents: list[str]) -> str:
    return dashes([f"file_path: docs/{d[:4]}.md\n\n{d}" for d in documents])


@pytest.mark.parametrize(
    ("form", "document"),
    [
        *((form, prose) for form in (dashes, wrapped)),
        *((form, paragraphs) for form in (tagged, numbered, indented, headed)),
    ],
)
def test_a_document_is_the_same_segments_wherever_it_stands(chat: Chat, form, document) -> None:
    documents = [document(i) if document is paragraphs else prose(i, 120) for i in range(4)]
    found = []
    for order in ORDERS:
        user = form([documents[i] for i in order])
        ids = chat.ids(("system", "Answer."), ("user", user))
        found.append(set(chat.segments(ids)))
        assert all("Why?" not in "".join(chat.texts(segment)) for segment in found[-1])
    tokens = sum(len(chat.tokenizer.encode(d, add_special_tokens=False)) for d in documents)
    assert sum(map(len, found[0] & found[1])) >= 0.85 * tokens
    # The numbers of documents are in no segment.
    assert len(found[0]) == len(found[1])


@pytest.mark.parametrize("mode", ["text", "cdc"])
@pytest.mark.parametrize(
    "question",
    ["Why?\n\nBe brief.", "Why?\n\nNote: be brief.\n\nAnswer in French.", "Why? Be brief. Answer in French."],
)
def test_a_question_of_several_paragraphs_is_in_no_segment(tokenizer_dirs, question: str, mode: str) -> None:
    chat = Chat(tokenizer_dirs["qwen"], PATTERNS, query_tokens=64)
    for i in range(30):
        ids = chat.ids(("user", f"{prose(('a', i), 120)}\n\n{prose(('b', i), 120)}\n\n{question}"))
        for segment in chat.segments(ids, mode):
            assert "Why?" not in "".join(chat.texts(segment))


def test_a_system_message_in_tags_leads(chat: Chat) -> None:
    system = f"<role>\n{prose('role', 60)}\n</role>"
    ids = chat.ids(("system", system), ("user", "\n\n".join([prose(1, 60), prose(2, 60), "Why?"])))
    [(first, _), _] = chat.segmenter.find(ids, "text").spans
    assert "</role>" in "".join(chat.texts(ids[:first]))


def test_closing_tags_at_the_end_of_a_message_are_in_no_segment(chat: Chat) -> None:
    documents = [prose(i, 60) for i in range(4)]
    found = []
    for order in ORDERS:
        context = "\n\n".join(
            ["Use this:\n\n<context>\n" + documents[order[0]], *(documents[i] for i in order[1:])]
        )
        ids = chat.ids(("system", f"{context}\n</context>"), ("user", "Why?"))
        found.append(set(chat.segments(ids)))
    assert len(found[0]) == 4 and found[0] == found[1]
