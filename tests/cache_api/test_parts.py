"""Parts of a prompt or content that stand for separators and segments, and texts that only look like them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.cache_api.commands import Content
from vllm_hypic.cache_api.expand import CHAT, COMPLETIONS, TOKENIZE, MisplacedId, expand, ids_in, shown
from vllm_hypic.cache_api.forms import id_form, own_seal
from vllm_hypic.cache_api.registry import Place
from vllm_hypic.primitives.tokens import PrimitiveIds, PrimitiveTexts

TEXTS = PrimitiveTexts()
SEAL = own_seal()
SEALED = SEAL.texts(PrimitiveIds(7, 8, 9))
SEP_PART, PAD_PART = {"type": "hypic_sep"}, {"type": "hypic_pad"}
A, LEAD = ({"type": "hypic_segment", "id": name} for name in ("a", "lead"))
CONTENTS = {
    "a": Content(Place.INTERIOR, "text a", []),
    "lead": Content(Place.PROMPT, "system", []),
    "tokens": Content(Place.INTERIOR, None, [5, 6]),
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.fixture(params=[False, True], ids=["marked", "literal"])
def literal(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def expanded(path: str, body: dict[str, object], literal: bool) -> dict[str, object]:
    return expand(path, body, CONTENTS, SEALED if literal else TEXTS, SEAL, literal=literal)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([text("sys"), SEP_PART, text("doc"), SEP_PART, text("q")], "sys{sep}doc{sep}q"),
        ([SEP_PART, text("doc"), PAD_PART, SEP_PART], "{sep}doc{pad}{sep}"),
        ([text("sys"), A, text("q")], "sys{sep}text a{sep}q"),
        ([text("sys"), SEP_PART, A, SEP_PART, A, text("q")], "sys{sep}text a{sep}text a{sep}q"),
        ([LEAD, text("q")], "system{sep}q"),
        ([text("a"), text("b"), SEP_PART], "ab{sep}"),
    ],
)
def test_a_prompt_of_parts_is_written_as_one_text(parts, expected, literal):
    texts = SEALED if literal else TEXTS
    prompt = expected.format(sep=texts.sep, pad=texts.pad)
    for path in (COMPLETIONS, TOKENIZE):
        assert expanded(path, {"prompt": parts}, literal) == {"prompt": prompt}
    assert expanded(COMPLETIONS, {"prompt": [parts, "x"]}, literal) == {"prompt": [prompt, "x"]}


def test_parts_of_a_content_join_the_texts_beside_them_and_no_others(literal):
    sep = (SEALED if literal else TEXTS).sep
    content = [
        text("a"),
        {**text("b"), "extra": 1},
        SEP_PART,
        text("c"),
        text("d"),
        IMAGE,
        SEP_PART,
        A,
        IMAGE,
    ]
    messages = [{"role": "tool", "content": content}, {"role": "user", "content": None}, {"role": "user"}]
    for path in (CHAT, TOKENIZE):
        changed = expanded(path, {"messages": messages}, literal)["messages"]
        assert changed == [
            {
                "role": "tool",
                "content": [
                    text("a"),
                    {**text(f"b{sep}c"), "extra": 1},
                    text("d"),
                    IMAGE,
                    text(f"{sep}text a{sep}"),
                    IMAGE,
                ],
            },
            *messages[1:],
        ]


@given(
    st.lists(st.sampled_from([id_form("a"), TEXTS.sep, "<|hypic_", "x"]) | st.text(max_size=3)).map("".join)
)
def test_literal_text_is_left_as_it_is(value):
    chat = {"messages": [{"role": "user", "content": value}, {"role": "tool", "content": [text(value)]}]}
    for path, body in ((COMPLETIONS, {"prompt": value}), (COMPLETIONS, {"prompt": [value]}), (CHAT, chat)):
        assert ids_in(path, body, literal=True) is None and expanded(path, body, True) == body
    parts = [text(value), SEP_PART, text("q")]
    assert expanded(COMPLETIONS, {"prompt": parts}, True) == {"prompt": f"{value}{SEALED.sep}q"}


def test_ids_of_parts_are_looked_up_and_those_of_literal_texts_are_not():
    body = {"prompt": [text(id_form("b")), A, LEAD]}
    assert ids_in(COMPLETIONS, body) == ["b", "a", "lead"]
    assert ids_in(COMPLETIONS, body, literal=True) == ["a", "lead"]
    assert ids_in(COMPLETIONS, {"prompt": [SEP_PART]}) == [], "nothing to look up, something to replace"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [SEP_PART, "x"]}, "prompt[1]='x': expected a part of type text, hypic_sep"),
        ({"prompt": [SEP_PART, IMAGE]}, "prompt[1]={'type': 'image_url'"),
        ({"prompt": [{"type": "hypic_segment"}]}, 'expected an "id", that of a compiled segment'),
        ({"prompt": [{"type": "hypic_segment", "id": 7}]}, "'id': 7}: expected an \"id\""),
        ({"prompt": [text("x"), LEAD]}, "segment 'lead' was compiled as the leading one"),
    ],
)
def test_parts_that_cannot_stand_there_are_refused_by_name(body, reason, literal):
    with pytest.raises(MisplacedId, match=re.escape(reason)):
        expanded(COMPLETIONS, body, literal)


def test_a_segment_that_was_compiled_literally_cuts_no_prompt_later():
    contents = {"a": Content(Place.INTERIOR, f"one{TEXTS.sep}two", [])}
    with pytest.raises(MisplacedId, match="segment 'a' was compiled while text was literal"):
        expand(COMPLETIONS, {"prompt": [A]}, contents, TEXTS, SEAL)
    written = expand(COMPLETIONS, {"prompt": [A]}, contents, SEALED, SEAL, literal=True)["prompt"]
    assert written == f"{SEALED.sep}one{TEXTS.sep}two{SEALED.sep}"


def test_text_that_is_not_written_as_its_own_is_not_cut_by_characters():
    for part in (SEP_PART, A):
        body = {"prompt": [text("x"), part], "truncate_prompt_tokens": 9}
        with pytest.raises(MisplacedId, match="truncate_prompt_tokens cannot be combined with parts of"):
            expanded(COMPLETIONS, body, True)
        assert expanded(COMPLETIONS, body, False)["truncate_prompt_tokens"]


def test_vllm_reads_the_public_texts_of_parts(literal):
    parts = [text("x"), SEP_PART, A, text("y"), PAD_PART]
    public = f"x{TEXTS.sep}{id_form('a')}y{TEXTS.pad}"
    assert shown(COMPLETIONS, {"prompt": [parts, 7]}, TEXTS, literal=literal) == {"prompt": [public, 7]}
    chat = {"messages": [{"role": "user", "content": [*parts, IMAGE]}]}
    [message] = shown(CHAT, chat, TEXTS, literal=literal)["messages"]
    assert message == {"role": "user", "content": [text(public), IMAGE]}
