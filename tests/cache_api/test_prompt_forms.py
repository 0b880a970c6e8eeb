"""Ids and tokens written in texts, and ids replaced in requests."""

from __future__ import annotations

from contextvars import Context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.cache_api.commands import Content, Report
from vllm_hypic.cache_api.expand import CHAT, COMPLETIONS, MisplacedId, expand, ids_in, rewriting, shown
from vllm_hypic.cache_api.forms import (
    MAX_TOKEN_ID,
    Seal,
    UnresolvedId,
    WrittenTokens,
    has_forms,
    id_form,
    own_seal,
    public_text,
    split_forms,
)
from vllm_hypic.cache_api.registry import Place
from vllm_hypic.engine.front_end import _without_command
from vllm_hypic.primitives.options import LinkDefaults, link_of_request
from vllm_hypic.primitives.policies import LinkError
from vllm_hypic.primitives.tokens import PrimitiveTexts

TEXTS, SEAL = PrimitiveTexts(), own_seal()
SEP = TEXTS.sep
A, B, LEAD, CHAT_LEAD, TOKENS = (id_form(name) for name in ("a", "b", "lead", "chat", "tokens"))
CONTENTS = {
    "a": Content(Place.INTERIOR, "text a", []),
    "b": Content(Place.INTERIOR, "text b", []),
    "lead": Content(Place.PROMPT, "system", []),
    "chat": Content(Place.CHAT, "system", []),
    "tokens": Content(Place.INTERIOR, None, [5, 6]),
}


@given(st.lists(st.integers(0, MAX_TOKEN_ID)), st.text(max_size=5), st.text(max_size=5))
def test_tokens_come_back(tokens, before, after):
    written = SEAL.tokens(tokens)
    assert has_forms(before + written + after)
    expected = [before, WrittenTokens(tuple(tokens), len(written)), after]
    assert split_forms(before + written + after) == [part for part in expected if part != ""]
    assert len(written) <= 4 * len(tokens) + 60, "vLLM bounds the characters of a prompt"


def test_a_seal_counts_while_it_is_open_where_it_is_open():
    first, second = Seal(), Seal()
    texts = [seal.tokens([1, 2, 3]) for seal in (first, second)]

    def counts(text: str) -> bool:
        if not has_forms(text):
            assert split_forms(text) == [text] == [public_text(text, str)]
            return False
        assert split_forms(text) == [WrittenTokens((1, 2, 3), len(text))]
        assert public_text(f"<{text}>", str) == "<[1, 2, 3]>"
        return True

    with first:
        assert [counts(text) for text in texts] == [True, False]
        with second:
            assert [counts(text) for text in texts] == [False, True]
            assert not Context().run(counts, texts[1]), "another request"
    assert [counts(text) for text in texts] == [False, False]
    written = SEAL.tokens([1, 2, 3])
    for text in (written[:-2], written[1:], written.upper()):
        assert split_forms(text) == [text]


def test_tokens_that_a_template_alters_are_refused():
    written = SEAL.tokens([1, 2, 3])
    for altered in (written.replace(written[-6:-2], "AAAA"), written.lower(), written[:-3] + "|>"):
        with pytest.raises(ValueError, match="the chat template alters texts of messages"):
            split_forms(altered)


def test_only_commands_made_here_get_past_the_front_end():
    """An imitation stays among the options, where it is refused as unknown."""
    command = {"op": "page", "after": "", "limit": 10}
    for imitation in (command, "report", None, [command]):
        extra = {"hypic_command": imitation, "hypic_link": "full"}
        assert _without_command(extra) == extra
        with pytest.raises(LinkError, match="unknown request option 'hypic_command'"):
            link_of_request(_without_command(extra), LinkDefaults("hypic", 8))
    assert _without_command({"hypic_command": Report(), "x": 1}) == {"x": 1}


def test_an_id_that_nobody_replaced_is_refused():
    with pytest.raises(UnresolvedId, match="segment id 'a' is not known here"):
        split_forms(f"x{A}y")
    assert split_forms("about <|hypic_segment") == ["about <|hypic_segment"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"sys{A}question", f"sys{SEP}text a{SEP}question"),
        (f"sys{A}{B}question", f"sys{SEP}text a{SEP}text b{SEP}question"),
        (f"sys{SEP}{A}{SEP}{B}{SEP}question", f"sys{SEP}text a{SEP}text b{SEP}question"),
        (f"{A}question", f"{SEP}text a{SEP}question"),
        (f"sys{A} and {A}question", f"sys{SEP}text a{SEP} and {SEP}text a{SEP}question"),
        (f"{LEAD}{A}question", f"system{SEP}text a{SEP}question"),
        (f"{LEAD}{SEP}question", f"system{SEP}question"),
        (f"sys{A}", f"sys{SEP}text a{SEP}"),
        ("nothing", "nothing"),
    ],
)
def test_an_id_stands_for_its_segment_with_separators(prompt, expected):
    body = {"prompt": prompt, "max_tokens": 3}
    assert expand(COMPLETIONS, body, CONTENTS, TEXTS, SEAL) == {"prompt": expected, "max_tokens": 3}
    assert body["prompt"] == prompt, "the caller's is left as it was"


def test_prompts_in_a_list_and_ids_of_all_of_them():
    body = {"prompt": [f"x{A}y", f"x{B}{A}y", [1, 2]]}
    assert ids_in(COMPLETIONS, body) == ["a", "b"]
    assert expand(COMPLETIONS, body, CONTENTS, TEXTS, SEAL)["prompt"] == [
        f"x{SEP}text a{SEP}y",
        f"x{SEP}text b{SEP}text a{SEP}y",
        [1, 2],
    ]


def test_chat_messages_and_their_parts():
    body = {
        "messages": [
            {"role": "system", "content": CHAT_LEAD},
            {"role": "user", "content": [{"type": "text", "text": f"{A}q"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": f"{B}q"},
        ]
    }
    assert ids_in(CHAT, body) == ["chat", "a", "b"]
    assert expand(CHAT, body, CONTENTS, TEXTS, SEAL)["messages"] == [
        {"role": "system", "content": "system"},
        {"role": "user", "content": [{"type": "text", "text": f"{SEP}text a{SEP}q"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": f"{SEP}text b{SEP}q"},
    ]


def test_a_segment_of_tokens_is_written_as_tokens():
    [prompt] = [expand(COMPLETIONS, {"prompt": f"x{TOKENS}y"}, CONTENTS, TEXTS, SEAL)["prompt"]]
    before, written, after = prompt.split(SEP)
    assert (before, after) == ("x", "y") and split_forms(written) == [WrittenTokens((5, 6), len(written))]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETIONS, {"prompt": f"x{LEAD}"}, "segment 'lead' was compiled as the leading one"),
        (COMPLETIONS, {"prompt": CHAT_LEAD + "x"}, "segment 'chat' leads a chat"),
        (CHAT, {"messages": [{"role": "user", "content": LEAD}]}, "segment 'lead' leads a completion prompt"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": CHAT_LEAD}]},
            "must be the first thing in its first message",
        ),
        (COMPLETIONS, {"prompt": TOKENS + "x", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens cannot"),
    ],
)
def test_misplaced_ids_are_refused_by_name(path, body, reason):
    with pytest.raises(MisplacedId, match=reason):
        expand(path, body, CONTENTS, TEXTS, SEAL)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([A, "x" + A]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([COMPLETIONS, CHAT]),
    st.fixed_dictionaries({}, optional={"prompt": json_values, "messages": json_values, "echo": json_values}),
)
def test_any_json_object_passes(path, body):
    """What is no request at all is vLLM's to refuse."""
    assert set(ids_in(path, body) or ()) <= {"a"}
    changed = expand(path, body, CONTENTS, TEXTS, SEAL)
    assert ids_in(path, changed) is None and changed.keys() == body.keys()
    assert shown(path, body, TEXTS) == body, "what vLLM reads and repeats"
    name = "messages" if path == CHAT else "prompt"
    if name in body:
        wanted = rewriting(path, body, changed, SEAL)
        assert wanted.of(wanted.public) == wanted.written
