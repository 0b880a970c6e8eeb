"""``load``: with real servers once, its bookkeeping and refusals with small ones; and ``lmcache-bench``."""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import failed, measured, run
from fake_server import SEPARATOR, Fake
from lib.one_process import ONE_PROCESS

from benchmarks import bench_serve
from benchmarks import trace as traces
from benchmarks.bench_serve import Bench, BenchError, End, Outcome, TimedRequest
from benchmarks.client import Client
from benchmarks.lmcache_bench import Run, Workload, arms_of, require_same_prompts
from benchmarks.rates import LoadSettings, Overdue, Percentiles, Sustained, make_point, ratios
from benchmarks.search import RateSearch
from benchmarks.trace import TraceSettings, generate
from vllm_hypic.harness.fidelity import GateFailed

SMALL = ("--documents", "8", "--median-tokens", "70", "--max-tokens", "200", "--per-request", "2", "3")


# -- real servers ------------------------------------------------------------------------------------


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for name, value in ONE_PROCESS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_serves_searches_and_reports(tmp_path: Path):
    output, report = measured(
        tmp_path,
        "load",
        *("--size", "tiny", "--eager", "--threads", "1", "--cache-gib", "0.25", *SMALL),
        *("--min-tokens", "64", "--system-tokens", "64", "--output-tokens", "2", "4"),
        *("--requests", "6", "--warm-up", "6", "--probes", "2", "--start-rate", "4", "--limit", "30"),
        plot=False,
    )
    assert report["benchmark"] == "load"
    assert report["gate"]["cold_equals_warm"] == ["hypic"]
    sizes = report["gate"]["prompt_tokens"]
    assert sizes["stock"] == sizes["hypic"] and min(sizes["hypic"]) > 3 * 64
    # Both servers' caches have the same size.
    serve = report["settings"]["serve"]
    stock, hypic = (server["command"] for server in report["settings"]["servers"])
    assert f"--kv-cache-memory-bytes {2**28}" in stock and "hypic" not in stock
    assert f"--kv-cache-memory-bytes {2**28 - serve['pool_bytes']}" in hypic
    assert f'"pool_bytes": {serve["pool_bytes"]}' in hypic
    assert report["settings"]["trace"]["drawn"]["documents"] == 8
    points = report["results"]["points"]
    asked = [("stock", 4.0), ("hypic", 4.0), ("hypic", 8.0), ("stock", 8.0)]
    assert [(p["server"], p["rate"]) for p in points] == asked
    assert [p["first_request"] for p in points] == [6, 6, 12, 12]
    for point in points:
        assert point["ends"] == {"done": 6} and not point["errors"] and not point["replayed"]
        assert point["complete"] and point["within"]
        assert len(point["ttfts"]) == 6
        times = point["ttft_s"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] == times["max"] < 30
        assert point["seconds"] > 5 / point["rate"]
    # The same requests: separators are all that differs.
    separators = sum(len(r.documents) + 1 for r in generate(_settings(report)).requests[6:12])
    assert points[1]["prompt_tokens"] - points[0]["prompt_tokens"] == separators
    # Eight documents, and prompts that differ in their order: records are reused, prefixes are not.
    assert points[2]["cached_tokens"] > points[2]["prompt_tokens"] / 3
    assert points[2]["cached_tokens"] > points[3]["cached_tokens"]
    sustained = {s["server"]: s for s in report["results"]["sustained"]}
    assert sustained["hypic"] == {"server": "hypic", "rate": 8.0, "failed_rate": None, "probes": 2}
    [ratio] = report["results"]["ratios"]
    assert (ratio["server"], ratio["baseline"], ratio["ratio"]) == ("hypic", "stock", 1.0)
    metrics = report["results"]["metrics"]
    assert list(metrics) == ["hypic"]
    assert metrics["hypic"]["vllm:hypic_segments_hit_total"] > 0
    assert "hypic sustains 1 times the rate of stock" in output


def _settings(report: dict[str, Any]) -> TraceSettings:
    drawn = report["settings"]["trace"]["drawn"]
    return TraceSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in drawn.items()})


# -- small servers -----------------------------------------------------------------------------------


class _InThread:
    """``vllm bench serve`` as :func:`launch` would start it, in this process: it imports vLLM but once."""

    pid = 2**30
    """More than any process has."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._key = env.get("OPENAI_API_KEY")
        self._thread = threading.Thread(target=self._run, args=(command[3:],), daemon=True)
        self._thread.start()

    def _run(self, arguments: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("OPENAI_API_KEY", raising=False)
            if self._key:
                patch.setenv("OPENAI_API_KEY", self._key)
            bench_serve.main(arguments)
        self.returncode = 0

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.wait()

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None and timeout_s is None:
            return 1  # it was killed
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("vllm bench serve", timeout_s or 0.0)
        return 1 if self.returncode is None else 0


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "launch", _InThread)


@pytest.fixture
def two(in_thread: None) -> Iterator[tuple[Fake, Fake]]:
    with ExitStack() as stack:
        yield stack.enter_context(Fake()), stack.enter_context(Fake())


def urls(stock: Fake, hypic: Fake) -> list[str]:
    return ["--url", f"stock={stock.url}", "--url", f"hypic={hypic.url}"]


GATE = LoadSettings.gate_requests
"""Requests that a server which does not take our separator gets first, not streamed."""
FEW = ("--requests", "4", "--warm-up", "3", *SMALL)


def test_both_servers_get_the_same_requests(two: tuple[Fake, Fake], tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KEY_OF_MINE", "secret")
    stock, hypic = two
    pytest.importorskip("matplotlib")
    options = ("--rates", "40,80", "--api-key-env", "KEY_OF_MINE")
    output, report = measured(tmp_path, "load", *urls(stock, hypic), *FEW, *options)
    assert "secret" not in json.dumps(report) + output
    assert {key for _, _, key in stock.arrived + hypic.arrived if key} == {"Bearer secret"}
    trace = generate(_settings(report))
    assert len(trace.requests) == 3 + 2 * 4
    expected = [trace.prompt(r, None) for r in trace.requests]
    asked = [body["prompt"] for body in stock.streamed]
    marked = [body["prompt"] for body in hypic.streamed]
    # Warm-up first, then a window for each rate; within a window they may overtake each other.
    for window in (slice(0, 3), slice(3, 7), slice(7, 11)):
        assert sorted(asked[window]) == sorted(expected[window])
        assert sorted([i for i in p if i != SEPARATOR] for p in marked[window]) == sorted(expected[window])
    cuts = {tuple(prompt): len(r.documents) + 1 for prompt, r in zip(expected, trace.requests, strict=True)}
    assert all(p.count(SEPARATOR) == cuts[tuple(i for i in p if i != SEPARATOR)] for p in marked)
    body = stock.streamed[0]
    assert body["temperature"] == 0 and body["ignore_eos"] is True and body["model"] == "fake"
    lengths = {tuple(prompt): r.output_tokens for prompt, r in zip(expected, trace.requests, strict=True)}
    assert all(body["max_tokens"] == lengths[tuple(body["prompt"])] for body in stock.streamed)
    points = report["results"]["points"]
    order = [("stock", 40.0), ("hypic", 40.0), ("hypic", 80.0), ("stock", 80.0)]
    assert [(p["server"], p["rate"]) for p in points] == order
    assert [p["prompt_tokens"] for p in points[::3]] == [sum(map(len, expected[i : i + 4])) for i in (3, 7)]
    assert all(p["cached_tokens"] == 4 * 5 for p in points)
    assert report["results"]["sustained"] == [] == report["results"]["ratios"]


def test_texts_take_the_separator_of_their_server(two: tuple[Fake, Fake], tmp_path: Path):
    stock, other = two
    more = ("--url", f"other={other.url}", "--separator", "other=# #", "--form", "text", "--rates", "50")
    done = run("load", "--url", f"stock={stock.url}", *more, *FEW)
    assert done.exit_code == 0, done.output
    plain = sorted(body["prompt"] for body in stock.streamed)
    assert sorted(body["prompt"].replace("# #", "") for body in other.streamed) == plain
    assert all("# #" in body["prompt"] for body in other.streamed)
    assert not any("# #" in prompt for prompt in plain)


@pytest.mark.slow
def test_misses_end_a_search_early(tmp_path: Path):
    search = ("--limit", "0.2", "--probes", "2", "--start-rate", "1", "--warm-up-at-once", "4")
    with Fake(wait_s=0.1) as slow:
        slow.slow_down_after = 3  # the warm-up's
        asked = ("load", "--url", f"slow={slow.url}", *FEW, *search)
        output, report = measured(tmp_path, *asked, plot=False)
        assert slow.broken_off >= 2 and slow.first_tokens == 3
    results = report["results"]
    assert results["sustained"] == [{"server": "slow", "rate": None, "failed_rate": 0.5, "probes": 2}]
    assert [p["rate"] for p in results["points"]] == [1.0, 0.5]
    for point in results["points"]:
        # What was overdue decided: the rest was given up, and there are no figures.
        assert point["ends"] == {"stopped": 4}
        assert not point["within"] and not point["complete"] and point["ttft_s"] is None
    assert "slow sustains no rate, not 0.5" in output


def test_finish_measures_them_to_the_end(in_thread: None, tmp_path: Path):
    with Fake(wait_s=0.3) as slow:
        limits = ("--limit", "0.2", "--probes", "1", "--start-rate", "20", "--finish")
        _, report = measured(tmp_path, "load", "--url", f"slow={slow.url}", *FEW, *limits, plot=False)
    [point] = report["results"]["points"]
    assert point["complete"] and not point["within"] and point["ttft_s"]["p50"] >= 0.3


def test_failures_are_told_and_have_no_figures(in_thread: None, tmp_path: Path):
    path = tmp_path / "load.json"
    with Fake(fails_from=GATE + 5) as server:
        output = failed("load", "--url", f"x={server.url}", *FEW, "--rates", "50", "--json", path)
    assert "2 requests failed (x: Internal Server Error" in output
    [point] = json.loads(path.read_text())["results"]["points"]
    assert point["ends"] == {"done": 2, "failed": 2}
    assert point["ttft_s"] is None and not point["within"] and point["errors"] == ["Internal Server Error"]
    with Fake(fails_from=GATE) as server:
        output = failed("load", "--url", f"x={server.url}", *FEW, "--rates", "50")
    assert "correctness gate: x: 3 of 3 requests failed: Internal Server Error" in output


def test_answers_that_end_early_or_never_have_failed(in_thread: None, monkeypatch: pytest.MonkeyPatch):
    # Answers end early when an engine dies under them: vLLM's client takes what came for an answer.
    with Fake(short=1) as server:
        asked = [TimedRequest(0.0, [5, 6], 4), TimedRequest(0.1, "w", 8)]
        [one, other] = Bench(server.url, "fake").run(asked)
    assert (one.end, one.error) == (End.FAILED, "the answer has 3 of 4 tokens")
    assert (other.end, other.error) == (End.FAILED, "the answer has 7 of 8 tokens")
    monkeypatch.setattr(bench_serve, "START_S", 1.0)
    with Fake(wait_s=6.0) as server:
        [outcome] = Bench(server.url, "fake", timeout_s=0.5).run([TimedRequest(0.0, [1], 1)])
    assert outcome.end is End.TIMEOUT and "0.5 s" in outcome.error and outcome.ttft is None


def test_requests_arrive_when_they_are_due_or_a_few_at_a_time(in_thread: None):
    # A loop that waits for an answer would send the second after two seconds. Machines may be busy.
    schedule = [TimedRequest(0.5 + 0.1 * i, [7] * (i + 1), 2) for i in range(6)]
    with Fake(wait_s=2.0) as server:
        outcomes = Bench(server.url, "fake").run(schedule)
    assert server.most_working == 6
    arrived = [at - server.arrived[0][0] for at, _, _ in server.arrived]
    assert arrived == pytest.approx([request.at - 0.5 for request in schedule], abs=1.5)
    assert [o.end for o in outcomes] == [End.DONE] * 6
    assert [o.prompt_tokens for o in outcomes] == [*range(1, 7)]
    assert all(0 <= o.late < 1.5 and o.sent == pytest.approx(o.scheduled + o.late) for o in outcomes)
    assert all(o.ttft >= 2.0 + o.late and o.ended > o.sent + 2.0 and len(o.gaps) == 1 for o in outcomes)
    with Fake(wait_s=0.5) as server:
        outcomes = Bench(server.url, "fake").run([TimedRequest(0.0, [i], 1) for i in range(7)], at_once=3)
    assert server.most_working == 3 and [o.end for o in outcomes] == [End.DONE] * 7
    assert sorted(body["prompt"] for body in server.streamed) == [[i] for i in range(7)]
    assert all(o.late == 0 for o in outcomes)


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(bench_serve, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_serve.py").write_text("raise SystemExit('no such client')")
    with pytest.raises(BenchError, match=r"(?s)ended with exit code 1:.*no such client"):
        Bench("http://127.0.0.1:9", "x").run([TimedRequest(0.0, [1], 1)])


def test_a_server_without_counts_is_never_overdue():
    settings = LoadSettings(requests=1, limit_s=0.01)
    assert not Overdue(Client("http://127.0.0.1:9"), {}, [TimedRequest(0.0, [1], 1)], settings)()


def test_servers_that_fail_the_gate_stop_the_run():
    with Fake(steady=False) as server:
        output = failed("load", "--url", f"hypic={server.url}", *FEW, "--rates", "50")
        assert not server.streamed  # nothing was measured
    assert "correctness gate: hypic: cold and warm" in output and "different logprobs" in output
    with Fake(fails_from=0) as server:
        output = failed("load", "--url", f"x={server.url}", *FEW, "--rates", "50")
    assert "/v1/completions: HTTP 500: " in output
    assert "http://127.0.0.1:9/v1/models" in failed("load", "--url", "x=http://127.0.0.1:9", *FEW)


def test_a_separator_that_is_no_single_token_is_refused(two: tuple[Fake, Fake]):
    stock, hypic = two
    separators = ("--separator", "stock=<|hypic_sep|>", "--separator", "hypic=# #")
    assert "separator '# #' gives" in failed("load", *urls(stock, hypic), *separators, *FEW)


def test_write_trace_and_send_it(two: tuple[Fake, Fake], tmp_path: Path):
    stock, _ = two
    path = tmp_path / "trace.jsonl"
    address = ("--url", f"stock={stock.url}")
    assert run("load", *address, *FEW, "--rates", "50", "--seed", "7", "--write-trace", path).exit_code == 0
    assert not stock.arrived
    trace = traces.load(path)
    assert len(trace.requests) == 7 and trace.settings["seed"] == 7
    # One measurement more than the trace has requests for: it starts again, and says so.
    more = ("--requests", "4", "--warm-up", "3", "--rates", "50,60", "--trace", path)
    output, report = measured(tmp_path, "load", *address, *more, plot=False)
    assert [p["replayed"] for p in report["results"]["points"]] == [False, True]
    assert "started again" in output
    first = [trace.prompt(r, None) for r in trace.requests[:3]]
    assert sorted(b["prompt"] for b in stock.streamed[:3]) == sorted(first)


def test_the_memory_of_both_servers_is_ours_to_give(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    done = run("load", "--size", "tiny")
    assert done.exit_code == 2 and "VLLM_CPU_KVCACHE_SPACE overrides" in done.output


# -- figures -----------------------------------------------------------------------------------------


def outcome(at: float, ttft: float, *, end: End = End.DONE) -> Outcome:
    return Outcome(at, end, "", at + 0.001, at + ttft + 0.4, ttft, (0.1, 0.2), 100, 3)


def test_points_figures():
    settings = LoadSettings(requests=4, limit_s=2.0, percentile=75)
    outcomes = [outcome(i, t) for i, t in enumerate((1.0, 2.5, 0.5, 1.5))]
    point = make_point("x", 2.0, 10, outcomes, settings, cached=240)
    assert point.complete and point.within  # one of four may be late
    assert point.ttft_s == Percentiles(1.0, 2.5, 2.5, pytest.approx(1.375), 2.5)
    assert point.gap_s.p50 == pytest.approx(0.1) and point.gap_s.max == pytest.approx(0.2)
    assert point.tpot_s.p50 == pytest.approx(0.15)
    assert point.seconds == pytest.approx(3 + 1.5 + 0.4)
    assert point.output_tokens_per_s == pytest.approx(12 / 4.9)
    assert point.prompt_tokens_per_s == pytest.approx(400 / 4.9)
    assert (point.prompt_tokens, point.cached_tokens) == (400, 240)
    assert point.late_s == pytest.approx(0.001)
    assert not make_point("x", 2.0, 10, [*outcomes[:3], outcome(3, 2.1)], settings).within
    # Ratios come with what the brackets allow.
    stock, hypic = Sustained("stock", 0.2, 0.25, 5), Sustained("hypic", 0.8, 1.0, 5)
    [ratio] = ratios([stock, hypic])
    assert (ratio.server, ratio.baseline, ratio.ratio) == ("hypic", "stock", pytest.approx(4.0))
    assert (ratio.low, ratio.high) == (pytest.approx(3.2), pytest.approx(5.0))
    better = Sustained("stock --prefix-match-unit 16", 0.4, 0.5, 5)
    assert [(r.server, r.baseline, r.ratio) for r in ratios([stock, better, hypic])] == [
        ("stock", better.server, pytest.approx(0.5)),
        ("hypic", better.server, pytest.approx(2.0)),
    ]
    assert ratios([hypic]) == []
    [none] = ratios([Sustained("stock", None, 0.1, 3), hypic])
    assert none.ratio is None and none.high is None and none.low == pytest.approx(8.0)


@pytest.mark.parametrize("end", [End.TIMEOUT, End.FAILED, End.STOPPED])
def test_one_request_without_an_answer_takes_the_figures(end: End):
    settings = LoadSettings(requests=3, limit_s=10.0, percentile=50)
    outcomes = [outcome(0, 1.0), outcome(1, 1.0), outcome(2, 1.0, end=end)]
    point = make_point("x", 1.0, 0, outcomes, settings)
    assert not point.complete and not point.within
    assert point.ttft_s is None and point.output_tokens_per_s is None and point.ttfts == []
    assert point.ends == {"done": 2, end.value: 1}


# -- the search for the rate that a server sustains --------------------------------------------------


def searched(search: RateSearch, capacity: float) -> RateSearch:
    """A server that sustains every rate up to ``capacity``."""
    while (rate := search.next_rate()) is not None:
        search.record(rate, rate <= capacity)
    return search


@pytest.mark.parametrize("capacity", [0.0312, 0.2, 0.99, 1.0, 1.01, 3.7, 60.0])
@pytest.mark.parametrize("precision", [1.02, 1.1, 1.5])
def test_finds_the_capacity(capacity: float, precision: float):
    search = searched(RateSearch(1.0, precision, probes=40), capacity)
    assert search.sustained is not None and search.failed is not None
    assert search.sustained <= capacity < search.failed <= precision * search.sustained


def test_probes_are_few_and_limited():
    assert len(searched(RateSearch(0.17, 1.1), 0.2).tried) == 5
    search = searched(RateSearch(1.0, 1.01, probes=4), 5.0)
    assert len(search.tried) == 4
    assert search.sustained <= 5.0 < search.failed
    # A lower failure counts.
    search = RateSearch(1.0)
    for rate, within in ((1.0, True), (2.0, True), (1.5, False)):
        search.record(rate, within)
    assert (search.sustained, search.failed) == (1.0, 1.5)


@pytest.mark.parametrize(("capacity", "sustained"), [(0.0, None), (1e9, 512.0)])
def test_ends_when_there_is_no_bracket(capacity: float, sustained: float | None):
    search = searched(RateSearch(1.0, probes=100), capacity)
    assert search.sustained == (sustained and pytest.approx(sustained, rel=0.6))
    assert len(search.tried) < 12


@pytest.mark.parametrize(("start", "precision"), [(0, 1.1), (float("nan"), 1.1), (1, 1.0)])
def test_bad_settings_are_refused(start, precision):
    with pytest.raises(ValueError, match="expected"):
        RateSearch(start, precision)


# -- LMCache's own tool against a server --------------------------------------------------------------

WORKLOAD = Workload(5, 1000, 200, 3, 1, 42)
TEXT = {"mode": "text"}


def a_run(segment: dict | None, ttft: float, cached: int = 0, prompt: int = 5218) -> Run:
    return Run(segment, (3 * ttft, ttft, ttft), (prompt,) * 3, cached, 1.0)


def test_runs_of_lmcaches_tool_become_ratios_and_shares() -> None:
    # Ratios are to the runs of stock before and after.
    runs = [a_run(None, 4.0), a_run(TEXT, 0.5), a_run(None, 6.0), a_run(TEXT, 0.7), a_run(None, 8.0)]
    stock, text = arms_of(runs, WORKLOAD)
    assert (stock.segment, stock.ttft.median, stock.sooner) == (None, 6.0, None)
    assert text.ttft.median == pytest.approx(0.6)
    assert text.sooner is not None and text.sooner.values == pytest.approx((10.0, 10.0))
    # What is no document counts as reused first.
    assert a_run(TEXT, 1.0, cached=2 * 218).reused(WORKLOAD) == 0
    assert a_run(TEXT, 1.0, cached=2 * 218 + 9000).reused(WORKLOAD) == pytest.approx(0.9)
    assert a_run(None, 1.0, cached=0).reused(WORKLOAD) == 0
    with pytest.raises(GateFailed, match=r"text has prompts of .*5217"):
        require_same_prompts([a_run(None, 1.0), a_run(TEXT, 1.0, prompt=5217)])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("one_process")
def test_lmcaches_tool_measures(smollm2: Path, tmp_path: Path):
    options = ["--eager", "--threads", "1", "--cache-gib", "1", "--segment", '{"mode": "text"}']
    small = ["--contexts", "3", "--context-tokens", "400", "--system-tokens", "50", "--permutations", "6"]
    stock, text = measured(tmp_path, "lmcache-bench", *options, *small, plot=False)[1]["results"]["arms"]
    assert stock["segment"] is None and text["segment"] == {"mode": "text"}
    assert text["reused"]["median"] > 0.5 > stock["reused"]["median"]
