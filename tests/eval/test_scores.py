"""Metrics of one answer."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.eval.runner import MethodAnswer
from vllm_hypic.eval.scores import f1, first_divergence, first_line, likelihood, rouge_l, score, words
from vllm_hypic.eval.task import Task

FEW_WORDS = st.lists(st.sampled_from("abcd"), max_size=7)
LOGPROBS = {1: math.log(0.6), 2: math.log(0.3), 3: math.log(0.05)}


def task(*answers: str) -> Task:
    return Task("t", "system", ("segment",), "question", answers, 8)


def outcome(
    text: str, tokens: Sequence[int] = (1, 2), logprobs: dict[int, float] | None = None
) -> MethodAnswer:
    return MethodAnswer(text, tuple(tokens), LOGPROBS if logprobs is None else logprobs, 10, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Blue\tlamp.", ["blue", "lamp"]),
        ("val3 val12", ["val3", "val12"]),
        ("It's an 'A'!", ["its"]),
        ("A", ["a"]),  # a letter that is the answer, not an article
        ("  ", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected
    assert first_line(f"\n \n {text} \ntwo") == (f" {text} " if text.strip() else "two")
    assert first_line("") == ""


@pytest.mark.parametrize(
    ("metric", "answers", "text", "right"),
    [
        ("exact", ("val1 val2",), "val1 val2", True),
        ("exact", ("val1 val2",), "val2 val1", False),  # order matters
        ("exact", ("val1 val2",), "val1", False),
        ("exact", ("no", "The Nile"), "nile.", True),  # any of them
        ("exact", ("1234567",), "\n 1234567.\nQuestion: another", True),  # the model went on
        ("exact", ("1234567",), "12345678", False),
        ("exact", ("",), "", True),
        ("contains", ("3059",), "The access code of the Paris office is 3059.", True),
        ("contains", ("3059",), "The access code is 13059.", False),  # other digits of a longer number
        ("contains", ("red brick",), "Its walls are made of red, and of brick", False),
        ("contains", ("red brick", "granite"), "The walls: the Red Brick", True),
        ("contains", ("3059",), "", False),
    ],
)
def test_right_answers(metric: str, answers: tuple[str, ...], text: str, right: bool) -> None:
    assert getattr(score(task(*answers), outcome(text), outcome("whatever")), metric) is right


def test_partial_credit_is_the_best_over_the_answers() -> None:
    # Two of three said words are right, of two and of four.
    found = score(task("red lamp", "red lamp near mill"), outcome("red lamp there"), outcome(""))
    assert found.f1 == pytest.approx(2 * 2 / (2 + 3))
    assert found.rouge_l == pytest.approx(2 * 2 / (2 + 3))
    swapped = score(task("red lamp"), outcome("lamp red"), outcome(""))
    assert (swapped.f1, swapped.rouge_l) == (1.0, 0.5)
    # F1 counts repeated words once each.
    assert f1(["a", "b"], ["a", "a", "a", "b"]) == pytest.approx(2 * 2 / 6)
    assert f1([], []) == 1.0
    assert f1(["a"], []) == 0.0


@given(FEW_WORDS, FEW_WORDS)
def test_rouge_l_is_the_longest_common_subsequence(right: list[str], said: list[str]) -> None:
    def subsequences(of: list[str]) -> set[tuple[str, ...]]:
        return {c for n in range(len(of) + 1) for c in itertools.combinations(of, n)}

    longest = max(map(len, subsequences(right) & subsequences(said)))
    expected = 2 * longest / (len(right) + len(said)) if right or said else 1.0
    assert rouge_l(right, said) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 5, 3), 1),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2), (1, 2, 3), 2),
        ((1,), (2,), 0),
        ((), (), None),
    ],
)
def test_first_divergence(reference: tuple[int, ...], other: tuple[int, ...], expected: int | None) -> None:
    assert first_divergence(reference, other) == expected


def test_distance_to_the_reference() -> None:
    same = score(task("x"), outcome("x"), outcome("y"))
    assert (same.kl, same.same_argmax) == (0.0, True)
    # What is left of probability is a token of its own: 0.05 in the reference.
    other = {1: math.log(0.3), 2: math.log(0.6), 3: math.log(0.05)}
    found = score(task("x"), outcome("x", logprobs=other), outcome("y"))
    assert found.kl == pytest.approx(0.6 * math.log(2) - 0.3 * math.log(2))
    assert not found.same_argmax
    # Missing logprobs are an error.
    with pytest.raises(KeyError):
        score(task("x"), outcome("x", logprobs={1: -1.0}), outcome("y"))
    # Likelihood is of the forced tokens.
    full = MethodAnswer("", (1, 2), LOGPROBS, 10, 0, forced=(-1.0, -3.0))
    found = likelihood(full, outcome(""))
    assert (found.nll, found.kl, found.same_argmax) == (2.0, 0.0, True)
