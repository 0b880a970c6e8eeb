"""The search for the rate that a server sustains."""

from __future__ import annotations

import pytest

from benchmarks.search import RateSearch


def run(search: RateSearch, capacity: float) -> RateSearch:
    """A server that sustains every rate up to ``capacity``."""
    while (rate := search.next_rate()) is not None:
        search.record(rate, rate <= capacity)
    return search


@pytest.mark.parametrize("capacity", [0.0312, 0.2, 0.99, 1.0, 1.01, 3.7, 60.0])
@pytest.mark.parametrize("precision", [1.02, 1.1, 1.5])
def test_finds_the_capacity(capacity: float, precision: float):
    search = run(RateSearch(1.0, precision, probes=40), capacity)
    assert search.sustained is not None and search.failed is not None
    assert search.sustained <= capacity < search.failed <= precision * search.sustained


def test_few_probes_are_enough_near_the_start():
    assert len(run(RateSearch(0.17, 1.1), 0.2).tried) == 5


@pytest.mark.parametrize(("capacity", "sustained"), [(0.0, None), (1e9, 512.0)])
def test_ends_when_there_is_no_bracket(capacity: float, sustained: float | None):
    search = run(RateSearch(1.0, probes=100), capacity)
    assert search.sustained == (sustained and pytest.approx(sustained, rel=0.6))
    assert len(search.tried) < 12


def test_probes_are_limited():
    search = run(RateSearch(1.0, 1.01, probes=4), 5.0)
    assert len(search.tried) == 4
    assert search.sustained <= 5.0 < search.failed


def test_a_lower_failure_counts():
    search = RateSearch(1.0)
    for rate, within in ((1.0, True), (2.0, True), (1.5, False)):
        search.record(rate, within)
    assert (search.sustained, search.failed) == (1.0, 1.5)


@pytest.mark.parametrize(("start", "precision"), [(0, 1.1), (float("nan"), 1.1), (1, 1.0)])
def test_bad_settings_are_refused(start, precision):
    with pytest.raises(ValueError, match="expected"):
        RateSearch(start, precision)
