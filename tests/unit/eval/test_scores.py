"""Metrics of one answer; intervals against closed forms and against what resampling must give."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.stats import Z, share
from vllm_hypic.eval import estimates
from vllm_hypic.eval.estimates import Estimate
from vllm_hypic.eval.runner import MethodAnswer
from vllm_hypic.eval.scores import f1, first_divergence, first_line, likelihood, rouge_l, score, words
from vllm_hypic.eval.task import Task

FEW_WORDS = st.lists(st.sampled_from("abcd"), max_size=7)
LOGPROBS = {1: math.log(0.6), 2: math.log(0.3), 3: math.log(0.05)}


def task(*answers: str) -> Task:
    return Task("t", "system", ("segment",), "question", answers, 8)


def outcome(text: str, logprobs: dict[int, float] = LOGPROBS) -> MethodAnswer:
    return MethodAnswer(text, (1, 2), logprobs, 10, 4)


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
    with pytest.raises(KeyError):
        score(task("x"), outcome("x", logprobs={1: -1.0}), outcome("y"))
    # Likelihood is of the forced tokens.
    found = likelihood(MethodAnswer("", (1, 2), LOGPROBS, 10, 0, forced=(-1.0, -3.0)), outcome(""))
    assert (found.nll, found.kl, found.same_argmax) == (2.0, 0.0, True)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_the_interval_of_a_share_ends_where_the_score_test_rejects(n_and_hits: tuple[int, int]) -> None:
    n, hits = n_and_hits
    found = share([True] * hits + [False] * (n - hits))
    assert found.value == hits / n
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        if 0 < end < 1:
            # Wilson's ends are the shares p from which hits / n is exactly Z standard errors away.
            assert abs(hits / n - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), rel=1e-6)


def test_a_share_of_few_is_uncertain() -> None:
    assert share([True] * 12).low == pytest.approx(12 / (12 + Z**2))
    assert share([False] * 12).high == pytest.approx(Z**2 / (12 + Z**2))


def test_the_bootstrap_is_that_of_all_resamples() -> None:
    # With three values all 27 resamples can be listed.
    values = [0.0, 1.0, 5.0]
    means = [sum(c) / 3 for c in itertools.product(values, repeat=3)]
    found = estimates.mean(values)
    assert found.value == pytest.approx(2.0)
    assert found.n == 3
    low, high = np.percentile(means, (2.5, 97.5), method="inverted_cdf")
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    values = [random.Random(i).random() for i in range(40)]
    assert estimates.mean(values) == estimates.mean(values)


def test_the_bootstrap_of_many_values_is_the_normal_interval() -> None:
    rng = random.Random(0)
    values = [rng.gauss(3, 2) for _ in range(2000)]
    found = estimates.mean(values)
    reach = Z * float(np.std(values)) / math.sqrt(len(values))
    assert found.high - found.low == pytest.approx(2 * reach, rel=0.05)
    assert found.low + reach == pytest.approx(found.value, abs=0.1 * reach)


def test_differences_are_paired() -> None:
    # Prompts differ much, the two methods differ by one point in each: nothing is uncertain.
    reference = [float(i) for i in range(50)]
    found = estimates.difference([r - 1 for r in reference], reference)
    assert found == Estimate(-1.0, -1.0, -1.0, 50)
    # 200 prompts, 10 lost and 2 gained: variance of the difference is known.
    own = [0.0] * 10 + [1.0] * 190
    full = [1.0] * 10 + [0.0] * 2 + [1.0] * 188
    found = estimates.difference(own, full)
    assert found.value == pytest.approx(-8 / 200)
    spread = math.sqrt((12 / 200 - (8 / 200) ** 2) / 200)
    assert found.high - found.low == pytest.approx(2 * Z * spread, rel=0.1)
    assert found.low < found.value < found.high < 0
    with pytest.raises(ValueError, match="zip"):
        estimates.difference([1.0], [1.0, 2.0])


def test_groups_count_alike_and_are_resampled_by_themselves() -> None:
    found = estimates.mean_of_means([[0.0] * 90, [1.0] * 10])
    assert found == Estimate(0.5, 0.5, 0.5, 100)
    # Two groups of 100: the variance of the mean of their means is a quarter of the sum of theirs.
    found = estimates.mean_of_means([[0.0, 1.0] * 50, [0.0, 1.0] * 50])
    reach = Z * math.sqrt(2 * (0.25 / 100) / 4)
    assert found.high - found.low == pytest.approx(2 * reach, rel=0.1)
    assert Estimate(0.5, 0.4, 0.6, 9).times(100) == Estimate(50.0, 40.0, 60.0, 9)


def test_nothing_has_no_mean() -> None:
    for function in (share, estimates.mean, estimates.mean_of_means):
        with pytest.raises(ValueError, match="at least one"):
            function([])
    with pytest.raises(ValueError, match="at least one"):
        estimates.mean_of_means([[1.0], []])
