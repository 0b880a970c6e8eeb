"""Texts of single tokens, and the words of a text, by which two texts are compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_hypic.primitives.token_texts import REPLACEMENT, SPECIAL, TokenTexts
from vllm_hypic.primitives.words import words_of

from .conftest import gpt2

TEXTS = [
    "The quick brown fox.",
    "def add(a, b):\n    return a + b\n",
    "Größe 東京は日本の首都です。 Привет, мир! 🙂🙂 हिन्दी",
    "",
]
GPT2 = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", TEXTS)
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
    ids = ids_of(GPT2, text)
    assert "".join(TokenTexts(GPT2).of(ids)) == text


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
