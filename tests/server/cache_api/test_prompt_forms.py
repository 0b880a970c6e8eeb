"""Ids and tokens written in texts, ids replaced in requests, and parts that stand for separators or ids."""

import re
from contextvars import Context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.cache_api.commands import Content, Report
from vllm_hypic.cache_api.expand import (
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    MisplacedId,
    expand,
    ids_in,
    rewriting,
    shown,
)
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
from vllm_hypic.primitives.tokens import PrimitiveIds, PrimitiveTexts

from .conftest import SEP_PART
from .conftest import part as text

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
    for damaged in (written[:-2], written[1:], written.upper()):
        assert split_forms(damaged) == [damaged]


def test_tokens_that_a_template_alters_and_unknown_ids_are_refused():
    written = SEAL.tokens([1, 2, 3])
    for altered in (written.replace(written[-6:-2], "AAAA"), written.lower(), written[:-3] + "|>"):
        with pytest.raises(ValueError, match="the chat template alters texts of messages"):
            split_forms(altered)
    with pytest.raises(UnresolvedId, match="segment id 'a' is not known here"):
        split_forms(f"x{A}y")
    assert split_forms("about <|hypic_segment") == ["about <|hypic_segment"]


def test_only_commands_made_here_get_past_the_front_end():
    """An imitation stays among the options, where it is refused as unknown."""
    command = {"op": "page", "after": "", "limit": 10}
    for imitation in (command, "report", None, [command]):
        extra = {"hypic_command": imitation, "hypic_link": "full"}
        assert _without_command(extra) == extra
        with pytest.raises(LinkError, match="unknown request option 'hypic_command'"):
            link_of_request(_without_command(extra), LinkDefaults("hypic", 8))
    assert _without_command({"hypic_command": Report(), "x": 1}) == {"x": 1}


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


def test_half_a_surrogate_pair_is_in_no_id():
    assert ids_in(COMPLETIONS, {"prompt": id_form("a\ud800")}) is None


def test_ids_in_prompts_messages_and_their_parts():
    body = {"prompt": [f"x{A}y", f"x{B}{A}y", [1, 2]]}
    assert ids_in(COMPLETIONS, body) == ["a", "b"]
    prompts = [f"x{SEP}text a{SEP}y", f"x{SEP}text b{SEP}text a{SEP}y", [1, 2]]
    assert expand(COMPLETIONS, body, CONTENTS, TEXTS, SEAL)["prompt"] == prompts

    def chat(lead: str, part: str, content: str) -> dict[str, object]:
        parts = [text(part), {"type": "image_url"}]
        said = [("system", lead), ("user", parts), ("assistant", None), ("user", content)]
        return {"messages": [{"role": role, "content": what} for role, what in said]}

    body = chat(CHAT_LEAD, f"{A}q", f"{B}q")
    assert ids_in(CHAT, body) == ["chat", "a", "b"]
    wanted = chat("system", f"{SEP}text a{SEP}q", f"{SEP}text b{SEP}q")
    assert expand(CHAT, body, CONTENTS, TEXTS, SEAL) == wanted
    prompt = expand(COMPLETIONS, {"prompt": f"x{TOKENS}y"}, CONTENTS, TEXTS, SEAL)["prompt"]
    before, written, after = prompt.split(SEP)
    assert (before, after) == ("x", "y") and split_forms(written) == [WrittenTokens((5, 6), len(written))]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETIONS, {"prompt": f"x{LEAD}"}, "segment 'lead' is a leading segment"),
        (COMPLETIONS, {"prompt": CHAT_LEAD + "x"}, "segment 'chat' leads a chat"),
        (CHAT, {"messages": [{"role": "user", "content": LEAD}]}, "segment 'lead' leads a completion prompt"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": CHAT_LEAD}]},
            "expected at the start of a chat's first message",
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


# -- parts of a prompt or content ---------------------------------------------------------------------

SEALED = SEAL.texts(PrimitiveIds(7, 8, 9))
PAD_PART = {"type": "hypic_pad"}
A_PART, LEAD_PART = ({"type": "hypic_segment", "id": name} for name in ("a", "lead"))
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


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
        ([text("sys"), A_PART, text("q")], "sys{sep}text a{sep}q"),
        ([text("sys"), SEP_PART, A_PART, SEP_PART, A_PART, text("q")], "sys{sep}text a{sep}text a{sep}q"),
        ([LEAD_PART, text("q")], "system{sep}q"),
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
    joined = {"extra": 1}
    content = [text("a"), {**text("b"), **joined}, SEP_PART, text("c"), text("d"), IMAGE]
    content += [SEP_PART, A_PART, IMAGE]
    written = [text("a"), {**text(f"b{sep}c"), **joined}, text("d"), IMAGE, text(f"{sep}text a{sep}"), IMAGE]
    messages = [{"role": "tool", "content": content}, {"role": "user", "content": None}, {"role": "user"}]
    for path in (CHAT, TOKENIZE):
        changed = expanded(path, {"messages": messages}, literal)["messages"]
        assert changed == [{"role": "tool", "content": written}, *messages[1:]]


def test_strings_of_a_content_are_texts(literal):
    def said(*content: object) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": list(content)}]}

    sep = (SEALED if literal else TEXTS).sep
    assert expanded(CHAT, said("a", SEP_PART, "b"), literal) == said(text(f"a{sep}b"))
    assert ids_in(CHAT, said(f"x{A}")) == ["a"] and ids_in(CHAT, said("x")) is None
    assert expand(CHAT, said(f"x{A}"), CONTENTS, TEXTS, SEAL) == said(text(f"x{SEP}text a{SEP}"))


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
    body = {"prompt": [text(id_form("b")), A_PART, LEAD_PART]}
    assert ids_in(COMPLETIONS, body) == ["b", "a", "lead"]
    assert ids_in(COMPLETIONS, body, literal=True) == ["a", "lead"]
    assert ids_in(COMPLETIONS, {"prompt": [SEP_PART]}) == [], "nothing to look up, something to replace"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [SEP_PART, "x"]}, "prompt[1]='x': expected a part of type text, hypic_sep"),
        ({"prompt": [SEP_PART, IMAGE]}, "prompt[1]={'type': 'image_url'"),
        ({"prompt": [{"type": "hypic_segment"}]}, 'expected the "id" of a compiled segment'),
        ({"prompt": [{"type": "hypic_segment", "id": 7}]}, "'id': 7}: expected the \"id\""),
        ({"prompt": [{"type": "hypic_segment", "id": "a\ud800"}]}, 'expected the "id" of a compiled segment'),
        ({"prompt": [text("x"), LEAD_PART]}, "segment 'lead' is a leading segment"),
    ],
)
def test_parts_that_cannot_stand_there_are_refused_by_name(body, reason, literal):
    with pytest.raises(MisplacedId, match=re.escape(reason)):
        expanded(COMPLETIONS, body, literal)


def test_what_was_compiled_or_sent_literally_is_not_cut():
    contents = {"a": Content(Place.INTERIOR, f"one{TEXTS.sep}two", [])}
    with pytest.raises(MisplacedId, match="segment 'a' was compiled while text was literal"):
        expand(COMPLETIONS, {"prompt": [A_PART]}, contents, TEXTS, SEAL)
    written = expand(COMPLETIONS, {"prompt": [A_PART]}, contents, SEALED, SEAL, literal=True)["prompt"]
    assert written == f"{SEALED.sep}one{TEXTS.sep}two{SEALED.sep}"
    for part in (SEP_PART, A_PART):
        body = {"prompt": [text("x"), part], "truncate_prompt_tokens": 9}
        with pytest.raises(MisplacedId, match="truncate_prompt_tokens cannot be combined with parts that"):
            expanded(COMPLETIONS, body, True)
        assert expanded(COMPLETIONS, body, False)["truncate_prompt_tokens"]


def test_vllm_reads_the_public_texts_of_parts(literal):
    parts = [text("x"), SEP_PART, A_PART, text("y"), PAD_PART]
    public = f"x{TEXTS.sep}{id_form('a')}y{TEXTS.pad}"
    assert shown(COMPLETIONS, {"prompt": [parts, 7]}, TEXTS, literal=literal) == {"prompt": [public, 7]}
    chat = {"messages": [{"role": "user", "content": [*parts, IMAGE]}]}
    [message] = shown(CHAT, chat, TEXTS, literal=literal)["messages"]
    assert message == {"role": "user", "content": [text(public), IMAGE]}
