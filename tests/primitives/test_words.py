"""The words of a text: what two texts have in common when one asks about the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.words import words_of


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
