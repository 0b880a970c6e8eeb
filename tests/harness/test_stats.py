"""Medians, ranges, ratios, slopes and percentiles."""

from collections.abc import Callable

import numpy as np
import pytest

from vllm_hypic.harness.stats import Spread, misses_allowed, percentile, slope, slopes


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
