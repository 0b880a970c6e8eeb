"""``lmcache-bench``: a run of LMCache's tool against a real server; what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from one_process import ONE_PROCESS

from benchmarks import lmcache_bench as module
from benchmarks.__main__ import main
from benchmarks.lmcache_bench import Run, Workload, arms_of, require_same_prompts
from vllm_hypic.harness.gate import GateFailed

WORKLOAD = Workload(5, 1000, 200, 3, 1, 42)
TEXT = {"mode": "text"}


def a_run(segment: dict | None, ttft: float, cached: int = 0, prompt: int = 5218) -> Run:
    return Run(segment, (3 * ttft, ttft, ttft), (prompt,) * 3, cached, 1.0)


def test_ratios_are_to_the_runs_of_stock_before_and_after() -> None:
    runs = [a_run(None, 4.0), a_run(TEXT, 0.5), a_run(None, 6.0), a_run(TEXT, 0.7), a_run(None, 8.0)]
    stock, text = arms_of(runs, WORKLOAD)
    assert (stock.segment, stock.ttft.median, stock.sooner) == (None, 6.0, None)
    assert text.ttft.median == pytest.approx(0.6)
    assert text.sooner is not None and text.sooner.values == pytest.approx((10.0, 10.0))


def test_what_is_no_document_counts_as_reused_first() -> None:
    assert a_run(TEXT, 1.0, cached=2 * 218).reused(WORKLOAD) == 0
    assert a_run(TEXT, 1.0, cached=2 * 218 + 9000).reused(WORKLOAD) == pytest.approx(0.9)
    assert a_run(None, 1.0, cached=0).reused(WORKLOAD) == 0


def test_other_prompts_fail_the_gate() -> None:
    with pytest.raises(GateFailed, match=r"5217.*on text, on stock"):
        require_same_prompts([a_run(None, 1.0), a_run(TEXT, 1.0, prompt=5217)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--segment", '{"mode": "off"}'], "expected a mode that finds segments"),
        (["--segment", '{"mode": "words"}'], "words"),
        (["--segment", "text"], "text"),
        (["--contexts", "1"], "1 is not in the range"),
        (["--model", "/nowhere"], "'/nowhere' does not exist"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("a server was started"))
    done = CliRunner().invoke(main, ["lmcache-bench", *arguments])
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.output.split())


@pytest.mark.engine
@pytest.mark.slow
def test_measures(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "bench.json"
    options = ["--eager", "--threads", "1", "--cache-gib", "1", "--segment", '{"mode": "text"}']
    small = ["--contexts", "3", "--context-tokens", "400", "--system-tokens", "50", "--permutations", "6"]
    done = CliRunner().invoke(main, ["lmcache-bench", *options, *small, "--json", str(path)])
    assert done.exit_code == 0, done.output
    stock, text = json.loads(path.read_text())["results"]["arms"]
    assert stock["segment"] is None and text["segment"] == {"mode": "text"}
    assert text["reused"]["median"] > 0.5 > stock["reused"]["median"]
