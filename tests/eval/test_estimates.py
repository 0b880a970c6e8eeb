"""Intervals against closed forms and against what resampling must give."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.eval import estimates
from vllm_hypic.eval.estimates import Estimate, Z


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_the_interval_of_a_share_ends_where_the_score_test_rejects(n_and_hits: tuple[int, int]) -> None:
    n, hits = n_and_hits
    found = estimates.share([True] * hits + [False] * (n - hits))
    assert found.value == hits / n
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        if 0 < end < 1:
            # Wilson's ends are the shares p from which hits / n is exactly Z standard errors away.
            assert abs(hits / n - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), rel=1e-6)


def test_a_share_of_few_is_uncertain() -> None:
    assert estimates.share([True] * 12).low == pytest.approx(12 / (12 + Z**2))
    assert estimates.share([False] * 12).high == pytest.approx(Z**2 / (12 + Z**2))


def test_the_bootstrap_is_that_of_all_resamples() -> None:
    # With three values all 27 resamples can be listed.
    values = [0.0, 1.0, 5.0]
    means = [sum(c) / 3 for c in itertools.product(values, repeat=3)]
    found = estimates.mean(values)
    assert found.value == pytest.approx(2.0)
    assert found.n == 3
    low, high = np.percentile(means, (2.5, 97.5), method="inverted_cdf")
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    # Same values same interval.
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
    # The difference of binary scores.
    # 200 prompts, 10 lost and 2 gained: variance of the difference is known.
    own = [0.0] * 10 + [1.0] * 190
    full = [1.0] * 10 + [0.0] * 2 + [1.0] * 188
    found = estimates.difference(own, full)
    assert found.value == pytest.approx(-8 / 200)
    spread = math.sqrt((12 / 200 - (8 / 200) ** 2) / 200)
    assert found.high - found.low == pytest.approx(2 * Z * spread, rel=0.1)
    assert found.low < found.value < found.high < 0
    # Lists of different length are no pairs.
    with pytest.raises(ValueError, match="zip"):
        estimates.difference([1.0], [1.0, 2.0])


def test_groups_count_alike_and_are_resampled_by_themselves() -> None:
    # Groups count alike.
    found = estimates.mean_of_means([[0.0] * 90, [1.0] * 10])
    assert found == Estimate(0.5, 0.5, 0.5, 100)
    # Two groups of 100: the variance of the mean of their means is a quarter of the sum of theirs.
    found = estimates.mean_of_means([[0.0, 1.0] * 50, [0.0, 1.0] * 50])
    reach = Z * math.sqrt(2 * (0.25 / 100) / 4)
    assert found.high - found.low == pytest.approx(2 * reach, rel=0.1)
    # Other units.
    assert Estimate(0.5, 0.4, 0.6, 9).times(100) == Estimate(50.0, 40.0, 60.0, 9)


def test_nothing_has_no_mean() -> None:
    for function in (estimates.share, estimates.mean, estimates.mean_of_means):
        with pytest.raises(ValueError, match="at least one"):
            function([])
    with pytest.raises(ValueError, match="at least one"):
        estimates.mean_of_means([[1.0], []])
