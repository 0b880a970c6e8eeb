"""Texts and ids of the primitives, cutting, the prompt builders, and the fixed text before records.

Texts of single tokens, and the words of a text, by which two texts are compared.
"""

import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_hypic.primitives.builder import build_messages, build_prompt, build_prompt_ids
from vllm_hypic.primitives.context import context_text, context_tokens
from vllm_hypic.primitives.token_texts import REPLACEMENT, SPECIAL, TokenTexts
from vllm_hypic.primitives.tokens import Marker, PrimitiveIds, PrimitiveTexts, split_ids, split_text
from vllm_hypic.primitives.words import words_of

from .conftest import gpt2

TEXTS = PrimitiveTexts()
IDS = PrimitiveIds(sep=100, pdep=101, pad=102)
prompt_ids = partial(build_prompt_ids, ids=IDS)
dashed = partial(build_prompt, texts=PrimitiveTexts(sep="---"))

short_texts = st.text(alphabet="ab<|>", min_size=1, max_size=3)


def test_json_round_trip_and_its_errors():
    texts = PrimitiveTexts(sep="<<PIC_SEP>>", pad="é")
    assert PrimitiveTexts.from_json(texts.to_json()) == texts
    assert PrimitiveTexts.from_json('{"sep": "S"}') == PrimitiveTexts(sep="S")
    for damaged in ("{", "[]", '{"seperator": "x"}', '{"sep": ""}'):
        with pytest.raises(ValueError, match=r"token primitives|non-empty"):
            PrimitiveTexts.from_json(damaged)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrimitiveTexts(sep=""), "sep='': expected a non-empty string"),
        (lambda: PrimitiveTexts(pad=None), "pad=None: expected a non-empty string"),
        (lambda: PrimitiveTexts(pdep=3), "pdep=3: expected a non-empty string"),
        (lambda: PrimitiveTexts(sep="x", pad="x"), "sep='x': pad has the same text; the texts must differ"),
        (lambda: PrimitiveTexts("<<PIC", pad="<<PIC_SEP>>"), "sep='<<PIC': is part of pad='<<PIC_SEP>>'"),
        (lambda: PrimitiveTexts(literal="no"), "literal='no': expected true or false"),
        (lambda: PrimitiveTexts(sep="\ud800"), "sep='\\ud800': not valid Unicode text"),
        (lambda: PrimitiveIds(-1, 1, 2), "sep=-1: expected a token id"),
        (lambda: PrimitiveIds(True, 1, 2), "sep=True: expected a token id"),
        (lambda: PrimitiveIds(7, 7, 2), "must differ"),
    ],
)
def test_bad_texts_and_ids_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@given(
    st.lists(st.one_of(st.sampled_from(Marker), short_texts)),
    st.sampled_from([TEXTS, PrimitiveTexts("<|>", "a|", "bb")]),
)
def test_split_text_loses_nothing_and_leaves_no_marker_in_a_text(parts, texts):
    text = "".join(texts[p] if isinstance(p, Marker) else p for p in parts)
    found = split_text(text, texts)
    assert "".join(texts[p] if isinstance(p, Marker) else p for p in found) == text
    assert all(p and not texts.contains(p) for p in found if isinstance(p, str))
    assert all(isinstance(a, Marker) or isinstance(b, Marker) for a, b in pairwise(found))


def test_split_text_leftmost_match_wins():
    assert split_text("abc", PrimitiveTexts(sep="ab", pdep="bc", pad="~")) == [Marker.SEP, "c"]


@given(st.lists(st.integers(98, 104)))
def test_split_ids_loses_nothing(ids):
    found = split_ids(ids, IDS)
    assert [t for p in found for t in ([IDS[p]] if isinstance(p, Marker) else p)] == ids
    assert all(not IDS.contains(p) for p in found if not isinstance(p, Marker))
    assert IDS.contains(ids) == any(isinstance(p, Marker) for p in found)


def test_marker_of_an_id():
    assert [IDS.marker(t) for t in (*IDS, 99)] == [Marker.SEP, Marker.PDEP, Marker.PAD, None]


def test_build_prompt_joins_with_separators():
    prompt = build_prompt(system="S", segments=["a", "b"], query="q")
    assert prompt == "S<|hypic_sep|>a<|hypic_sep|>b<|hypic_sep|>q"
    # Without a system part the first document must not become the leading segment.
    assert split_text(build_prompt(segments=["a"], query="q"), TEXTS) == [Marker.SEP, "a", Marker.SEP, "q"]
    # Without a query the prompt ends in a separator: it warms its segments.
    assert split_text(build_prompt(segments=["a"]), TEXTS) == [Marker.SEP, "a", Marker.SEP]


def test_build_messages():
    texts = PrimitiveTexts(sep="|||")
    messages = build_messages(system="S", documents=("a", "b"), question="q", texts=texts)
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "|||a|||b|||q"}]
    assert build_messages(documents=["a"], question="q", texts=texts)[0]["role"] == "user"


def test_build_prompt_ids():
    prompt = build_prompt_ids(system=[1, 2], segments=[[3], np.array([4, 5])], query=(6,), ids=IDS)
    assert prompt == [1, 2, 100, 3, 100, 4, 5, 100, 6]
    assert all(type(token) is int for token in prompt)
    assert build_prompt_ids(segments=[[3]], ids=IDS) == [100, 3, 100]


@pytest.mark.parametrize(
    ("build", "given", "error", "message"),
    [
        (build_prompt, {"segments": "abc"}, TypeError, "segments: expected a list of texts, got str"),
        (build_prompt, {"segments": ["a", 3]}, TypeError, "segments[1]: expected text (str), got int"),
        (build_prompt, {"segments": ["a", ""]}, ValueError, "segments[1] is empty"),
        (build_prompt, {"segments": ["x<|hypic_pad|>"]}, ValueError, "segments[0] contains '<|hypic_pad|>'"),
        (build_prompt, {"segments": ["x"], "query": "<|hypic_sep|>"}, ValueError, "query contains"),
        (build_messages, {"documents": ["x", ""], "question": ""}, ValueError, "documents[1] is empty"),
        (build_messages, {"documents": ["x"], "question": TEXTS.sep}, ValueError, "question contains"),
        (build_messages, {"documents": ["x"], "system": b"s"}, TypeError, "system: expected text"),
        (prompt_ids, {"segments": ["ab"]}, TypeError, "segments[0]: expected a list"),
        (prompt_ids, {"segments": [3]}, TypeError, "segments[0]: expected a list"),
        (prompt_ids, {"segments": "ab"}, TypeError, "segments: expected a list"),
        (prompt_ids, {"segments": [[1.5]]}, TypeError, "segments[0][0]=1.5"),
        (prompt_ids, {"segments": [[-1]]}, ValueError, "segments[0][0]=-1"),
        (prompt_ids, {"segments": [[]]}, ValueError, "segments[0] is empty"),
        (prompt_ids, {"segments": [[1, 100]]}, ValueError, "is the id of sep"),
        (dashed, {"segments": ["first -", "second"]}, ValueError, "segments[0] contains '---'"),
    ],
)
def test_builders_refuse_with_the_place(build, given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build(**given)


CHAT = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}[end]\n{% endfor %}"


def test_the_plugin_brings_a_text() -> None:
    text = context_text(None)
    assert len(text) > 1000 and text == text.strip()


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "context.txt"
    path.write_text("  One page.\n", encoding="utf-8")
    assert context_text(str(path)) == "One page."
    path.write_text(" \n")
    with pytest.raises(ValueError, match="expected a text, but the file is empty"):
        context_text(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="context_file="):
        context_text(str(path))


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        (CHAT, "[user]\nOne page."),
        ("{{ strftime_now('%d %b %Y') }}" + CHAT, "01 Jan 2025[user]\nOne page."),
        (None, "One page."),
        ("{{ messages[0]['content'] | upper }}", "One page."),
        ("{{ raise_exception('User role must provide content as an iterable') }}", "One page."),
    ],
    ids=["chat", "dated", "none", "unusable", "refusing"],
)
def test_it_begins_the_user_turn_or_the_prompt_and_ends_neither(template: str | None, begins: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))
    tokenizer.chat_template = template
    assert context_tokens(tokenizer, "One page.") == tuple(tokenizer.encode(begins))


SAMPLES = [
    "The quick brown fox.",
    "def add(a, b):\n    return a + b\n",
    "Größe 東京は日本の首都です。 Привет, мир! 🙂🙂 हिन्दी",
    "",
]
GPT2 = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", SAMPLES)
def test_joined_they_are_the_text_of_all(tokenizer_dirs, kind, text):
    """As it reads behind another token: a decoder that drops the first space does not drop it there."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    before = ids_of(tokenizer, "a")
    ids = ids_of(tokenizer, text)
    whole = tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]
    texts = TokenTexts(tokenizer).of(ids)
    assert len(texts) == len(ids)
    if tokenizer.unk_token_id in ids:  # special to its tokenizer: it ends a word, and is none
        assert {t for t, i in zip(texts, ids, strict=True) if i == tokenizer.unk_token_id} == {SPECIAL}
    else:
        assert "".join(texts) == whole


@given(st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=40))
def test_byte_level_tokens_give_any_text_back(text):
    assert "".join(TokenTexts(GPT2).of(ids_of(GPT2, text))) == text


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (slice(0, 6), ["x", "", "", "", "🙂", "y"]),
        (slice(1, 4), [REPLACEMENT] * 3),
        (slice(0, 3), ["x", REPLACEMENT, REPLACEMENT]),
        (slice(2, 6), [REPLACEMENT, REPLACEMENT, REPLACEMENT, "y"]),
    ],
)
def test_a_character_stands_with_its_last_token_and_its_parts_read_as_what_they_are(cut, expected):
    assert TokenTexts(GPT2).of(ids_of(GPT2, "x🙂y")[cut]) == expected


def test_the_replacement_character_itself_may_stand_in_a_text():
    """Here it is three tokens, which look like parts of characters."""
    text = f"a{REPLACEMENT}b{REPLACEMENT}{REPLACEMENT} 東"
    found = "".join(TokenTexts(GPT2).of(ids_of(GPT2, text)))
    assert found.replace(REPLACEMENT, "") == text.replace(REPLACEMENT, "")


@given(st.lists(st.integers(0, len(GPT2) - 1), max_size=60), st.lists(st.integers(0, len(GPT2) - 1)))
def test_any_tokens_have_texts_that_do_not_depend_on_what_came_before(ids, others):
    used = TokenTexts(GPT2)
    used.of(others)
    texts = used.of(ids)
    assert texts == TokenTexts(GPT2).of(ids) == used.of(ids)
    assert len(texts) == len(ids)


def test_special_tokens_end_words_and_name_none(tokenizer_dirs):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["qwen"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ids = ids_of(tokenizer, "fox<|im_end|>dog")
    assert "".join(TokenTexts(tokenizer).of(ids)) == "fox\ndog"


def test_a_vocabulary_without_the_letter_a_has_spaces_between_words_all_the_same():
    model = models.WordLevel({word: i for i, word in enumerate(["<unk>", "one", "two"])}, unk_token="<unk>")
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert TokenTexts(tokenizer).of(ids_of(tokenizer, "one two one")) == [" one", " two", " one"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" -- ...\n", []),
        ("The access code, of PARIS.", ["the", "access", "code", "of", "paris"]),
        ("Größe naïve", ["grösse", "naïve"]),
        ("naïve", ["naïve"]),
        ("\uff21\uff22\uff23\uff11\uff12", ["abc12"]),
        ("Привет, мир", ["привет", "мир"]),
        ("pi is 3.14, not 3.", ["pi", "is", "3.14", "not", "3"]),
        ("1,234 or 12,34", ["1,234", "or", "12", "34"]),
        ("10.0.0.1:8000", ["10.0.0.1", "8000"]),
        ("v2.0", ["v2", "0"]),
        ("é 3.14", ["é", "3.14"]),
        ("f(1, 2)", ["f", "1", "2"]),
        ("max_model_len", ["max_model_len", "max", "model", "len"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("parseJson2", ["parsejson2", "parse", "json2"]),
        ("__init__", ["__init__", "init"]),
        ("_", ["_"]),
        ("größe_max", ["grösse_max", "grösse", "max"]),
        ("x_1", ["x_1"]),
        ("東京都", ["東京", "京都"]),
        ("水", ["水"]),
        ("GPUは東京", ["gpu", "は東", "東京"]),
        ("서울의 밤", ["서울", "울의", "밤"]),
        ("हिन्दी में।", ["हिन्दी", "में"]),
        ("ที่นี่", ["ที", "ี่", "่น", "นี", "ี่"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),  # noqa: RUF001
    ],
)
def test_words(text, expected):
    assert words_of(text) == expected


@given(st.text(alphabet="abC_1 .,é東水é\n", max_size=30), st.text(max_size=30))
def test_texts_with_space_between_have_both_texts_words(left, right):
    assert words_of(f"{left}\n\n{right}") == words_of(left) + words_of(right)


@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=40))
def test_ascii_text_has_the_words_that_it_has_beside_other_scripts(text):
    """Text of ASCII alone takes a shorter path."""
    assert words_of(f"{text} é") == [*words_of(text), "é"]
