"""``scale``: the simulator against closed forms and hand computation; its constants."""

import dataclasses
import json
import math
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from commands import measured
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scale as command
from benchmarks.eviction_shapes import SHAPES
from benchmarks.scale import measure, under_load
from benchmarks.scale_control import CLIENTS, control_plane
from benchmarks.scale_model import PRESETS, Costs, Lengths, Request, at_once, poisson
from benchmarks.scale_results import GOAL, GOAL_WORKERS
from benchmarks.scale_sim import Cluster, Policy, alone_s, least_s, simulate, simulate_whole

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"
RECORDS = dataclasses.replace(SHAPES["random-150m"], token_bytes=1, state_bytes=0, transition_bytes=0)
"""One byte a token."""

LOADED_WAYS = ("lpt by time", "lpt, loads unknown", "round robin", "whole requests")
"""Columns of the page's table of times under load."""

PLAIN = Costs(
    records=RECORDS,
    **{"plan_s": 0, "dispatch_s": 0, "admit_s": 0, "round_trip_s": 0, "flops_quadratic": 0},
    **{"prefill_token_s": 1, "prefill_pair_s": 0, "prefill_segment_s": 0, "first_token_s": 0},
    **{"link_bytes_s": math.inf, "ingress_bytes_s": math.inf},
    **{"compose_segment_s": 0, "compose_token_s": 0},
)
"""A token takes a second; everything else nothing."""
ROUTED = dataclasses.replace(PLAIN, plan_s=0.25, dispatch_s=0.125, admit_s=0.5, first_token_s=2)

segment_lists = st.lists(st.integers(1, 50), min_size=1, max_size=12)
worker_numbers = st.integers(1, 5)
policies = st.sampled_from(Policy)


def one(segments, cluster, costs=PLAIN):
    return simulate([Request.of(0.0, segments, costs)], cluster, costs).times[0]


@given(segment_lists, policies, st.booleans())
def test_one_worker_takes_the_sum(segments, policy, pipelined):
    assert one(segments, Cluster(1, policy, pipelined)).ttft_s == sum(segments)


@given(st.integers(1, 20), st.integers(1, 7), policies)
def test_equal_segments_take_as_many_rounds_as_it_needs(k, workers, policy):
    assert one([10] * k, Cluster(workers, policy)).ttft_s == math.ceil(k / workers) * 10


@given(segment_lists, worker_numbers)
def test_no_assignment_beats_the_bound_and_lpt_is_within_grahams(segments, workers):
    costs = dataclasses.replace(ROUTED, dispatch_s=0, prefill_pair_s=0.01, round_trip_s=0.5)
    request = Request.of(0.0, segments, costs)
    least, proven = least_s(request, workers, costs)
    assert proven
    for policy in Policy:
        for pipelined in (True, False):
            times = simulate([request], Cluster(workers, policy, pipelined), costs).times[0]
            assert times.ttft_s >= least - 1e-9
    lpt = one(segments, Cluster(workers, Policy.LPT_TIME), costs)
    prefill = least - costs.plan_s - costs.admit_s - 0.5 - request.compose_s
    within = (4 / 3 - 1 / (3 * workers)) * prefill
    assert lpt.prefilled_s - lpt.begun_s <= within + 1e-9


def test_a_lone_segment_passes_every_station_once():
    prefill, compose = {"prefill_pair_s": 0.5, "prefill_segment_s": 3}, {"compose_segment_s": 7}
    links = {"link_bytes_s": 2, "ingress_bytes_s": 4, "round_trip_s": 0.0625}
    costs = dataclasses.replace(ROUTED, **prefill, **compose, **links, compose_token_s=0.75)
    times = one([4], Cluster(3), costs)
    assert times.begun_s == 0.25 + 0.125 + 0.5
    assert times.prefilled_s == times.begun_s + 4 + 0.5 * 16 + 3
    assert times.received_s == times.prefilled_s + 0.0625 + 4 / 2  # the slower of both ways
    assert times.first_token_s == times.received_s + 2 + 7 + 0.75 * 4
    fast_link = dataclasses.replace(costs, link_bytes_s=16)
    times = one([4], Cluster(3), fast_link)
    assert times.received_s == times.prefilled_s + 0.0625 + 4 / 4


def test_two_workers_by_hand():
    """6 and 3 go to the first worker, 5 and 4 to the second; a byte of record takes half a second.

    ===========  ==================  ======================================================
    worker       computes            sends
    ===========  ==================  ======================================================
    first        0-6, 6-9            6-9, 9-10.5
    second       0-5, 5-9            5-7.5, 9-11
    ===========  ==================  ======================================================
    """
    costs = dataclasses.replace(PLAIN, link_bytes_s=2, first_token_s=1)
    times = one([3, 4, 5, 6], Cluster(2), costs)
    assert (times.prefilled_s, times.received_s, times.first_token_s) == (9, 11, 12)
    # Waiting: the first computes 0-6, sends 6-9, computes 9-12, sends 12-13.5;
    # the second computes 0-5, sends 5-7.5, computes 7.5-11.5, sends 11.5-13.5.
    times = one([3, 4, 5, 6], Cluster(2, pipelined=False), costs)
    assert (times.prefilled_s, times.received_s, times.first_token_s) == (12, 13.5, 14.5)
    # Round robin: 3 and 5, 4 and 6. The second computes 0-4, 4-10 and sends 4-6, 10-13.
    times = one([3, 4, 5, 6], Cluster(2, Policy.ROUND_ROBIN), costs)
    assert (times.prefilled_s, times.received_s, times.first_token_s) == (10, 13, 14)


def test_links_carry_one_record_at_a_time():
    # Both are computed at 4; each has a link of its own, but 4 bytes take a second on the way in.
    costs = dataclasses.replace(PLAIN, link_bytes_s=8, ingress_bytes_s=4)
    assert one([4, 4], Cluster(2), costs).received_s == 4 + 1 + 1
    two = [Request.of(0.0, [4], costs), Request.of(0.0, [4], costs)]
    received = [t.received_s for t in simulate(two, Cluster(2, combiners=2), costs).times]
    assert received == [5, 5]
    # Computed at 4 and 5; 4-8 and 8-9 on the link.
    costs = dataclasses.replace(PLAIN, link_bytes_s=1)
    assert one([4, 1], Cluster(1), costs).received_s == 9


def test_router_and_combine_node_serve_one_request_at_a_time():
    requests = [Request.of(0.0, [1, 1], ROUTED), Request.of(0.0, [1], ROUTED)]
    first, second = simulate(requests, Cluster(8), ROUTED).times
    assert first.begun_s == 0.25 + 0.125 + 0.5
    assert first.prefilled_s == 0.25 + 2 * 0.125 + 0.5 + 1  # its second segment is sent after the first
    assert second.begun_s == 0.25 + 2 * 0.125 + 0.25 + 0.125 + 0.5  # after both segments of the first
    assert first.first_token_s == first.received_s + 2
    assert second.first_token_s == first.first_token_s + 2 > second.received_s + 2
    apart = simulate(requests, Cluster(8, combiners=2), ROUTED).times
    assert apart[1].first_token_s == apart[1].received_s + 2
    assert one([], Cluster(2), ROUTED).ttft_s == 0.25 + 0.5 + 2, "nothing to prefill: only combined"


@given(
    st.lists(st.tuples(st.floats(0, 50), st.lists(st.integers(1, 30), max_size=5)), max_size=8),
    worker_numbers,
    policies,
    st.booleans(),
)
def test_work_is_conserved(arrivals, workers, policy, pipelined):
    costs = dataclasses.replace(ROUTED, link_bytes_s=10, ingress_bytes_s=10, compose_segment_s=0.5)
    requests = [Request.of(when, segments, costs) for when, segments in sorted(arrivals)]
    outcome = simulate(requests, Cluster(workers, policy, pipelined), costs)
    assert sum(outcome.busy_s) == pytest.approx(sum(request.prefill_s for request in requests))
    assert sum(outcome.combining_s) == pytest.approx(sum(request.compose_s for request in requests))
    for request, times in zip(requests, outcome.times, strict=True):
        stations = dataclasses.astuple(times)
        assert stations[0] == request.arrival_s and list(stations) == sorted(stations)
        longest = max((piece.prefill_s for piece in request.pieces), default=0)
        assert times.prefilled_s >= times.begun_s + longest - 1e-9
        assert times.first_token_s >= times.received_s + request.compose_s - 1e-9
    assert max(outcome.busy_s) <= max((times.prefilled_s for times in outcome.times), default=0) + 1e-9


@given(segment_lists, worker_numbers, policies, st.booleans())
def test_more_of_anything_is_never_slower(segments, workers, policy, pipelined):
    slow = dataclasses.replace(ROUTED, link_bytes_s=3, ingress_bytes_s=6, round_trip_s=0.25)
    ttft = one(segments, Cluster(workers, policy, pipelined), slow).ttft_s
    for better in (
        dataclasses.replace(slow, dispatch_s=0),
        dataclasses.replace(slow, prefill_token_s=0.5),
        dataclasses.replace(slow, first_token_s=0),
    ):
        assert one(segments, Cluster(workers, policy, pipelined), better).ttft_s <= ttft + 1e-9
    # Without limits on transfers, for which the order of arrivals matters, also more workers, and pipelining.
    free = dataclasses.replace(ROUTED, dispatch_s=0)
    lpt = [one(segments, Cluster(m), free).ttft_s for m in range(1, 8)]
    assert lpt == sorted(lpt, reverse=True)
    ways = [one(segments, Cluster(workers, policy, p), slow).prefilled_s for p in (True, False)]
    assert ways[0] <= ways[1]


def test_one_worker_is_lindleys_queue():
    """W(i+1) = max(0, W(i) + S(i) - A(i+1)): the simulator's times under load are those of the recursion."""
    costs = dataclasses.replace(PLAIN, prefill_token_s=0.001)
    drawn = at_once(500, 1, Lengths(800, 0.9), costs, seed=0)
    requests = poisson(drawn, 0.8 / statistics.fmean(r.prefill_s for r in drawn), seed=1)
    waits, wait = [], 0.0
    for i, request in enumerate(requests):
        if i:
            gap = request.arrival_s - requests[i - 1].arrival_s
            wait = max(0.0, wait + requests[i - 1].prefill_s - gap)
        waits.append(wait + request.prefill_s)
    found = [t.ttft_s for t in simulate(requests, Cluster(1), costs).times]
    assert found == pytest.approx(waits)
    assert [t.ttft_s for t in simulate_whole(requests, 1, costs)] == pytest.approx(waits)


def test_arrivals_are_poisson_and_lengths_log_normal():
    # Mean wait of M/D/1 at load 0.7: rho / (2 (1 - rho)) services.
    requests = poisson([Request.of(0.0, [1], PLAIN)] * 40_000, 0.7, seed=3)
    waits = [t.ttft_s - 1 for t in simulate(requests, Cluster(1), PLAIN).times]
    assert statistics.fmean(waits) == pytest.approx(0.7 / (2 * 0.3), rel=0.1)
    drawn = Lengths(1340, 0.9).draw(5000, random.Random(0))
    assert min(drawn) == 256 and max(drawn) == 8192
    assert statistics.median(drawn) == pytest.approx(1340, rel=0.05)
    assert len({n for n in drawn if n not in (256, 8192)}) > 1000
    assert drawn == Lengths(1340, 0.9).draw(5000, random.Random(0))


def test_whole_requests_go_to_the_instance_with_the_least_to_do():
    costs = dataclasses.replace(PLAIN, first_token_s=1)
    requests = [Request.of(when, [n], costs) for when, n in ((0, 10), (1, 2), (2, 1), (12, 1), (12, 5))]
    # 0: 0-11; 1: 1-4; the third sees 10 against 2 tokens; the fourth sees both idle and takes the
    # first, the fifth then the second.
    assert [t.first_token_s for t in simulate_whole(requests, 2, costs)] == [11, 4, 6, 14, 18]
    times = simulate_whole([Request.of(0.0, [3], ROUTED)], 2, ROUTED)
    alone = alone_s(Request.of(0.0, [3], ROUTED), ROUTED)
    assert times[0].ttft_s == 0.25 + 0.125 + 0.5 + 3 + 2 == 0.375 + alone


def test_policies_by_hand():
    # LPT looks at present loads and the blind one does not.
    requests = [Request.of(0.0, [10, 1], PLAIN), Request.of(0.5, [5, 4], PLAIN)]
    # Present loads are 10 and 1: both go behind the 1. Blind: the 5 goes behind the 10.
    assert simulate(requests, Cluster(2, Policy.LPT), PLAIN).times[1].prefilled_s == 10
    assert simulate(requests, Cluster(2, Policy.LPT_BLIND), PLAIN).times[1].prefilled_s == 15
    # A load is gone when its segment is computed.
    requests = [Request.of(0.0, [10], PLAIN), Request.of(10.5, [3, 2], PLAIN)]
    # Both workers are idle again: 3 to the first, 2 to the second.
    assert simulate(requests, Cluster(2), PLAIN).times[1].prefilled_s == 13.5
    # Round robin goes on where it ended.
    requests = [Request.of(0.0, [4, 4, 4], PLAIN), Request.of(0.5, [4], PLAIN)]
    # The first took workers 0, 1, 0; the next turn is worker 1's.
    assert simulate(requests, Cluster(2, Policy.ROUND_ROBIN), PLAIN).times[1].prefilled_s == 8
    # By tokens, 8 against 4 + 4, the 8 gets one of the 1s; by time, 72 against 20 + 20, none.
    costs = dataclasses.replace(PLAIN, prefill_pair_s=1)
    segments = [8, 4, 4, 1, 1]
    tokens, time = (one(segments, Cluster(2, p), costs).ttft_s for p in (Policy.LPT, Policy.LPT_TIME))
    assert time == 72 < tokens == 74


def test_the_cpu_preset_is_what_was_measured():
    reports = [DOCS / "cpu" / f"ttft-{name}.json" for name in ("length", "segments")]
    points = [p for path in reports for p in json.loads(path.read_text())["results"]["points"]]
    k = np.array([p["shape"]["segments"] for p in points], float)
    n = np.array([p["shape"]["tokens"] for p in points], float)
    cold, warm = (np.array([p["seconds"][w]["median"] for p in points]) for w in ("cold", "warm"))
    prefill = np.linalg.lstsq(np.stack([n, n**2], 1), (cold - warm) / k, rcond=None)[0]
    compose = np.linalg.lstsq(np.stack([np.ones_like(k), k, k * n], 1), warm, rcond=None)[0]
    costs = PRESETS["cpu-169m"]
    assert [costs.prefill_token_s, costs.prefill_pair_s] == pytest.approx(prefill, rel=0.01)
    constants = [costs.first_token_s, costs.compose_segment_s, costs.compose_token_s]
    assert constants == pytest.approx(compose, rel=0.01)
    for i in range(len(k)):  # and they describe it
        assert costs.prefill_s(int(n[i])) == pytest.approx((cold - warm)[i] / k[i], rel=0.1)
        assert costs.compose_s([int(n[i])] * int(k[i])) == pytest.approx(warm[i], rel=0.12)


def test_the_other_presets_are_what_was_published():
    """docs/benchmarks/cpu.md, Memory, and HyPIC's figures."""
    for tokens, mib in ((256, 8.66), (1024, 10.8), (2048, 14.5)):
        assert PRESETS["cpu-169m"].records.value(tokens).nbytes == pytest.approx(mib * 2**20, rel=0.05)
    costs = PRESETS["hypic-gpu"]
    assert costs.prefill_s(1024) == pytest.approx(0.0407)
    assert costs.compose_s([1024] * 5) - costs.compose_s([1024] * 4) == pytest.approx(0.0023)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(PLAIN, plan_s=-1), "plan_s=-1: expected a finite number >= 0"),
        (lambda: dataclasses.replace(PLAIN, compose_token_s=math.nan), "compose_token_s=nan"),
        (lambda: dataclasses.replace(PLAIN, link_bytes_s=0), "link_bytes_s=0: expected a number > 0"),
        (lambda: Cluster(0), "workers=0: expected at least 1"),
        (lambda: Cluster(1, combiners=0), "combiners=0: expected at least 1"),
    ],
)
def test_constants_that_make_no_sense_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_lpt_reaches_seven_times_on_eight_workers():
    costs = PRESETS["cpu-169m"]
    point = measure(at_once(20, 64, Lengths(1340, 0.9), costs, seed=0), GOAL_WORKERS, costs)
    lpt, turns = point.way(Policy.LPT_TIME), point.way(Policy.ROUND_ROBIN)
    assert GOAL <= lpt.speed_up.mean <= point.best.mean < 8
    assert turns.speed_up.mean < 0.75 * lpt.speed_up.mean
    assert point.way(Policy.LPT_TIME, False).speed_up.mean < lpt.speed_up.mean
    assert lpt.parts.transfer_s < 0.05 * lpt.parts.dispatch_phase_s
    costs = PRESETS["hypic-gpu"]
    sample = at_once(5, 12, Lengths(1000, 0.9), costs, seed=0)
    point = measure(sample, 4, costs)
    ttft = [simulate([r], Cluster(4, Policy.LPT_TIME), costs).times[0].ttft_s for r in sample]
    assert point.way(Policy.LPT_TIME).parts.ttft_s == pytest.approx(statistics.fmean(ttft))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_results_in_the_documents_are_those_of_this_code(name):
    """docs/benchmarks/segment-parallel.md quotes these files."""
    written = json.loads((DOCS / "scale" / f"{name}.json").read_text())
    asked, costs = written["settings"], PRESETS[name]
    stated = {key: value for key, value in asked["costs"].items() if key != "records"}
    assert stated == {key: getattr(costs, key) for key in stated}
    lengths = Lengths(**asked["lengths"])
    sample = at_once(asked["requests"], asked["segments"], lengths, costs, asked["seed"])
    [point] = (point for point in written["results"]["points"] if point["workers"] == GOAL_WORKERS)
    now = measure(sample, GOAL_WORKERS, costs)
    assert point["best"]["mean"] == pytest.approx(now.best.mean)
    for before, after in zip(point["ways"], now.ways, strict=True):
        assert (before["policy"], before["pipelined"]) == (after.policy, after.pipelined)
        assert before["speed_up"]["mean"] == pytest.approx(after.speed_up.mean)


def test_the_page_quotes_the_speed_ups_of_these_files():
    lines = (DOCS / "segment-parallel.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    quoted = [cells for cells in rows if cells[0] in PRESETS]
    assert {(cells[0], int(cells[1])) for cells in quoted} >= {(name, GOAL_WORKERS) for name in PRESETS}
    for name, workers, *figures in quoted:
        points = json.loads((DOCS / "scale" / f"{name}.json").read_text())["results"]["points"]
        [point] = (point for point in points if point["workers"] == int(workers))
        found = [way["speed_up"]["mean"] for way in point["ways"] if way["pipelined"]]
        assert figures == [f"{value:.2f}" for value in (*found, point["best"]["mean"])]


def test_the_page_quotes_the_times_under_load_of_these_files():
    text = (DOCS / "segment-parallel.md").read_text()
    quoted = re.findall(r"^\| (64|6) segments, (0\.\d) \|(.*)\|$", text, re.MULTILINE)
    assert len(quoted) == 4
    for segments, offered, cells in quoted:
        name = "cpu-169m" if segments == "64" else "cpu-169m-6-segments"
        loaded = json.loads((DOCS / "scale" / f"{name}.json").read_text())["results"]["loaded"]
        [point] = (point for point in loaded if point["offered"] == float(offered))
        for cell, way in zip(cells.split("|"), LOADED_WAYS, strict=True):
            if cell.strip() == "unstable":
                assert point["p50_s"][way] > 100
                continue
            shown = [float(figure) for figure in cell.replace("s", "").split("/")]
            assert shown == pytest.approx([point["p50_s"][way], point["p99_s"][way]], rel=0.005)


def test_under_load_lpt_beats_round_robin():
    costs = PRESETS["cpu-169m"]
    crowd = at_once(300, 32, Lengths(1340, 0.9), costs, seed=1)
    rows = [under_load(crowd, offered, 8, costs, seed=2) for offered in (0.2, 0.8)]
    for row in rows:
        for times in (row.p50_s, row.p99_s):
            assert times["lpt by time"] < times["round robin"]
        assert all(row.p50_s[label] <= row.p99_s[label] for label in row.p50_s)
    assert rows[0].p99_s["lpt by time"] < rows[1].p99_s["lpt by time"]
    assert rows[0].p50_s["lpt by time"] < 0.3 * rows[0].p50_s["whole requests"]


def test_command_writes_tables_json_and_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "MEDIANS", (700, 1340))
    monkeypatch.setattr(command, "COUNTS", (4, 8))
    small = ["--requests", 3, "--arrivals", 100, "--segments", 10, "--workers", "1,4,8", "--loads", 0.3]
    small += ["--set", "compose_segment_s=0"]
    (output, one), (_, other) = (measured(tmp_path, "scale", *small) for _ in range(2))
    for part in ("speed-up over one instance", "where the time goes", "p99 of the time", "at least 7x"):
        assert part in output
    assert one["results"] == other["results"]
    assert [point["workers"] for point in one["results"]["points"]] == [1, 4, 8]
    assert one["settings"]["costs"]["compose_segment_s"] == 0
    assert one["results"]["control"] is None


def test_control_plane_is_measured_on_a_real_server():
    found = control_plane(names=2000, posts=8, at_once=(1, 4), workers=2)
    assert 64 < found.wire_bytes_per_name < 80 < found.memory_bytes_per_name < 300
    assert found.assign_s > 0 and found.names_per_s > 0
    asked = {(client, n) for client in CLIENTS for n in (1, 4)}
    assert {(posting.client, posting.at_once) for posting in found.postings} == asked
    assert all(posting.per_s > 0 for posting in found.postings)
