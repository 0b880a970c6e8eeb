"""Medians, ranges, ratios, slopes, percentiles; distances of distributions, and the gate that they pass."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lib import gate
from benchmarks.lib.stats import Fidelity, Spread, misses_allowed, slope, slopes
from vllm_hypic.eval.estimates import percentile
from vllm_hypic.harness.engine_calls import Answer
from vllm_hypic.harness.fidelity import TOP, distance, top
from vllm_hypic.primitives.policies import parse_link


def test_spreads() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.min, spread.max) == (2.5, 1.0, 10.0)
    assert spread.values == (3.0, 1.0, 2.0, 10.0)
    # Ratios go repeat by repeat: a machine that halves its speed in the second repeat changes none.
    one, other = Spread.of([10.0, 20.0, 10.0]), Spread.of([5.0, 10.0, 5.0])
    assert one.over(other) == Spread.of([2.0, 2.0, 2.0])


def test_slopes_are_least_squares() -> None:
    assert slope([4, 8, 12, 16], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.25)
    # An outlier in the middle of three points does not tilt the line, one at the end does.
    assert slope([0, 1, 2], [0.0, 9.0, 2.0]) == pytest.approx(1.0)
    assert slope([0, 1, 2], [0.0, 1.0, 5.0]) == pytest.approx(2.5)
    points = [Spread.of([1.0, 2.0]), Spread.of([3.0, 6.0])]
    assert slopes([1, 2], points).values == (2.0, 4.0), "one of every repeat"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: Spread.of([]), "at least one"),
        (lambda: Spread.of([1.0]).over(Spread.of([1.0, 2.0])), "zip"),
        (lambda: slope([1], [1.0]), "a slope needs"),
        (lambda: slope([2, 2], [1.0, 3.0]), "a slope needs"),
        (lambda: slope([1, 2], [1.0]), "a slope needs"),
        (lambda: percentile([], 50), "0 values"),
    ],
)
def test_what_is_undefined_is_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call()


@pytest.mark.parametrize("p", [1, 50, 90, 99, 100])
@pytest.mark.parametrize("n", [1, 2, 7, 60, 100, 101])
def test_percentile_is_numpys_inverted_cdf(n: int, p: int) -> None:
    values = np.random.default_rng(n).normal(size=n).tolist()
    assert percentile(values, p) == np.percentile(values, p, method="inverted_cdf")


@pytest.mark.parametrize("p", [50, 90, 99, 100])
@pytest.mark.parametrize("n", [1, 7, 60, 100, 250])
def test_misses_allowed_agrees_with_the_percentile(n: int, p: int) -> None:
    most = misses_allowed(n, p)
    within = [0.0] * n
    assert percentile([1.0] * most + within[most:], p) == 0.0
    if most < n:
        assert percentile([1.0] * (most + 1) + within[most + 1 :], p) == 1.0


def uniform(n: int) -> dict[int, float]:
    return dict.fromkeys(range(n), math.log(1 / n))


def test_only_the_references_top_tokens_count() -> None:
    found = distance(uniform(50), uniform(50))
    assert (found.max_abs, found.mean_abs, found.kl, found.same_argmax) == (0, 0, 0, True)
    reference = {i: math.log(0.04) if i < TOP else math.log(0.2 / 30) for i in range(50)}
    found = distance(reference, reference | {40: -1.0})
    assert found.max_abs == 0
    assert not found.same_argmax  # but the most likely token is looked for among all
    assert top({5: -3.0, 6: -1.0, 7: -2.0}) == [6, 7, 5]
    with pytest.raises(KeyError):  # a token that the other does not name
        distance({0: -0.1, 1: -3.0}, {0: -0.1})


def test_kl_is_that_of_the_two_way_split() -> None:
    """With one likely token and the rest lumped together, KL is that of two coins."""
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert distance({0: math.log(0.75)}, {0: math.log(0.5)}).kl == pytest.approx(expected)


def test_fidelity_has_medians_worst_cases_and_agreement() -> None:
    reference = {0: math.log(0.6), 1: math.log(0.4)}
    swapped = {0: math.log(0.4), 1: math.log(0.6)}
    near = {0: math.log(0.59), 1: math.log(0.41)}
    found = Fidelity.of([distance(reference, d) for d in (reference, near, swapped)])
    assert found.agreement == pytest.approx(2 / 3)
    assert found.kl < found.kl_worst == pytest.approx(0.2 * math.log(1.5))
    assert found.prompts == 3


def answer(cached: int = 0, logprobs: dict[int, float] | None = None) -> Answer:
    return Answer((7,), (0.5,), logprobs or {7: -1.0}, 100, cached)


ONE_BIT_MORE = {7: math.nextafter(-1.0, 0)}
SEAMS, ISLANDS = (parse_link("hypic", 8, "none", islands) for islands in ("none", "query-50"))


def test_what_passes() -> None:
    gate.require_same("answers", answer(), answer())
    gate.require_reuse(answer(cached=2 * (64 - 16)), 2, 64, SEAMS)
    gate.require_reuse(answer(cached=48), 2, 64, ISLANDS)
    gate.require_fresh(answer(), "stock")
    gate.require_close(distance({0: -0.1}, {0: -0.3}))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: gate.require_same("answers", answer(), answer(logprobs=ONE_BIT_MORE)), "answers differ"),
        (
            lambda: gate.require_reuse(answer(cached=95), 2, 64, SEAMS),
            "95 of 100 tokens were reused, expected at least 96",
        ),
        (
            lambda: gate.require_reuse(answer(cached=47), 2, 64, ISLANDS),
            "47 of 100 tokens were reused, expected at least 48",
        ),
        (lambda: gate.require_fresh(answer(cached=1), "stock"), "stock read 1 tokens"),
        (lambda: gate.checked_distance({3: -1.0}, {3: math.nan}, "hypic"), "the logprob of token 3 is nan"),
        (lambda: gate.require_close(distance({0: -0.01}, {0: -20.0})), "a gross error"),
    ],
    ids=["one-bit", "reuse", "reuse-with-islands", "fresh", "not-a-number", "gross-error"],
)
def test_what_the_gate_refuses(call: Callable[[], object], why: str) -> None:
    with pytest.raises(gate.GateFailed, match=why):
        call()
