"""``soak``: what it judges by, its schedule, and a minute of it with real servers."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import measured

from benchmarks.soak_checks import CUT_OFF, GIVEN_UP, Failure, Tokens, Trend, Verdict, excuse, judge
from benchmarks.soak_faults import Fault, FaultKind, schedule
from benchmarks.soak_traffic import KINDS

REFERENCE = Tokens(("a", "b", "c"), (-0.5, -0.7, -0.1), (1.0, 0.05, 2.0))


@pytest.mark.parametrize(
    ("ids", "logprobs", "verdict"),
    [
        (("a", "b", "c"), (-0.5, -0.7, -0.1), Verdict.SAME),
        (("a", "b", "c"), (-0.5, -0.7, -0.15), Verdict.CLOSE),
        (("a", "b", "c"), (-0.5, -0.7, -0.4), Verdict.WRONG),
        (("a", "x", "y"), (-0.5, -0.7, -3.0), Verdict.TIE),
        (("a", "x", "y"), (-0.8, -0.7, -3.0), Verdict.WRONG),
        (("a", "b", "x"), (-0.5, -0.7, -0.1), Verdict.WRONG),
        (("x", "b", "c"), (-0.5, -0.7, -0.1), Verdict.WRONG),
        (("a", "b"), (-0.5, -0.7), Verdict.WRONG),
        ((), (), Verdict.WRONG),
    ],
)
def test_only_rounding_may_change_an_answer(ids: tuple, logprobs: tuple, verdict: Verdict):
    found, _ = judge(Tokens(ids, logprobs, REFERENCE.margins), REFERENCE)
    assert found is verdict


def test_the_distance_is_of_tokens_before_a_difference():
    assert judge(Tokens(("a", "x"), (-1.0, -9.0), (1.0, 1.0)), REFERENCE) == (Verdict.WRONG, 0.5)


def test_a_leak_is_told_from_warming_up():
    times = [5.0 * i for i in range(721)]
    warms = Trend.of(times, [min(t, 900.0) for t in times])
    assert (warms.start, warms.end, warms.per_hour) == (900.0, 900.0, 0.0)
    leaks = Trend.of(times, [100 + t / 36 for t in times])
    assert leaks.per_hour == pytest.approx(100)
    assert leaks.grows(3600, 0.05, 20) and not warms.grows(3600, 0.05, 20)
    assert not leaks.grows(3600, 0.05, 51), "it grows by 50 in half an hour"
    with pytest.raises(ValueError, match="4 samples"):
        Trend.of(times[:3], times[:3])


def test_a_failure_is_excused_by_a_fault_of_its_time_alone():
    failed = Failure("composed", "http://x", None, f"RemoteProtocolError: {CUT_OFF}", 10.0, 11.0)
    paused = Fault(FaultKind.PAUSE_ABORT, 1, 10.5, 12.0)
    assert excuse(failed, [paused]) is not None
    assert excuse(failed, [replace(paused, begin_s=11.5)]) is None
    assert excuse(failed, [replace(paused, kind=FaultKind.PAUSE_KEEP)]) is None
    assert excuse(replace(failed, message="hangs"), [paused]) is None
    command = replace(failed, kind="cache API", status=503, message=GIVEN_UP)
    assert excuse(command, [paused]) is not None and excuse(command, []) is None
    disk = Fault(FaultKind.DISK, 0, 9.0)
    unwritable = Failure("cache API", "http://x", 503, "", 10.0, 11.0)
    assert excuse(unwritable, [disk]) is not None
    assert excuse(unwritable, []) is None
    assert excuse(replace(unwritable, kind="plain"), [disk]) is None


def test_every_fault_comes_within_six_minutes_and_a_worker_dies_each_minute():
    planned = schedule(6)
    assert {p.kind for p in planned} == set(FaultKind)
    assert [p.at_s for p in planned] == sorted(p.at_s for p in planned)
    deaths = [p for p in planned if p.kind is FaultKind.WORKER]
    assert [(int(p.at_s // 60), p.target) for p in deaths] == [(m, m % 2) for m in range(6)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute(tmp_path: Path):
    results = measured(tmp_path, "soak", "--minutes", 1, plot=False)[1]["results"]
    assert results["requests"].keys() == KINDS.keys()
    assert results["faults"].keys() == {p.kind.value for p in schedule(1)}
    assert Verdict.WRONG not in results["compared"] and results["compared"][Verdict.SAME] > 20
    assert not (results["failures"] or results["wrong"] or results["held"])
    assert {"combine0, engine: memory, MiB", "router, server: threads"} <= results["trends"].keys()
