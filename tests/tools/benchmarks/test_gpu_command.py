"""The commands: what they refuse, print and write; run on CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import failed, measured, run

from benchmarks.gpu import checks as checks_module
from benchmarks.gpu import gate
from benchmarks.gpu import kernels as kernels_module
from benchmarks.gpu.aims import Aim
from benchmarks.gpu.composed import Composition
from benchmarks.gpu.copies import MovingRecord
from benchmarks.gpu.device import MEANINGLESS
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.model import KINDS, PromptTimes, _aims, _marginals
from benchmarks.gpu.operators import INTERPRET, operators_for
from benchmarks.lib.stats import Spread
from vllm_hypic.backends.ops.program import Mode

WRONG = [Finding("merge", "case", "bfloat16", 0.5, 0.1), Finding("other", "case", "bfloat16", 0.0, 0.1)]


def test_little_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    # No vLLM; matplotlib for plots only; nothing that serves or stores.
    absent = ("vllm", "transformers", "matplotlib", "httpx", "prometheus_client", "triton")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.gpu.__main__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv(INTERPRET, raising=False)
    assert operators_for(torch.device("cpu")).name == "torch"


def test_kernels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output, written = measured(tmp_path, "gpu", "kernels", "--device", "cpu", "--repeats", 2)
    assert MEANINGLESS in output and "Gate passed" in output
    assert written["command"].startswith("python -m benchmarks.gpu")
    assert written["settings"]["device"]["meaningless"] == MEANINGLESS
    assert written["results"]["aims"] == []
    assert written["results"]["rates"]["copy"] > 0
    span, delta = (written["results"]["kernels"][name] for name in ("span", "delta"))
    kernels = {"attention, prefill", "attention, decode", "merge", "capture of K, V"}
    assert kernels <= {r["kernel"] for r in span}
    assert {r["kernel"] for r in delta} >= {"scan with T (capture)", "compose, records and seams"}
    for row in span + delta:
        assert row["floor"]["seconds"] > 0 and len(row["seconds"]["ours"]["values"]) == 2


def test_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("gpu", "checks", "--device", "cpu", "--kernels", "short_conv")
    assert done.exit_code == 0, done.output
    assert "short_conv: segments" in done.output and "errors are within their tolerances" in done.output
    monkeypatch.setattr(checks_module, "run_checks", lambda *_, **__: WRONG)
    assert "Error: merge, case: 0.5\n" in failed("gpu", "checks", "--device", "cpu")


def test_copies(tmp_path: Path) -> None:
    output, written = measured(tmp_path, "gpu", "copies", "--device", "cpu", "--repeats", 2, plot=False)
    assert MEANINGLESS in output and "beside a record that leaves" in output
    assert [len(p["passes"]) for p in written["results"]["passes"]] == [3, 3]
    assert len(written["results"]["passes"][0]["passes"]["alone"]["values"]) == 2


def test_what_errs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A record that comes as another is no result.
    monkeypatch.setattr(MovingRecord, "arrive", lambda record: record.mover.discard(record.there))
    output = failed("gpu", "copies", "--device", "cpu")
    assert "correctness gate: the arrived record differs from the sent record" in output
    monkeypatch.setattr(kernels_module, "run_checks", lambda *_: WRONG)
    output = failed("gpu", "kernels", "--device", "cpu")
    assert "correctness gate: merge, case: 0.5" in output and "other" not in output
    assert "TFLOP" not in output
    monkeypatch.setitem(gate.TOLERANCE, torch.bfloat16, 1e-6)
    output = failed("gpu", "model", "--device", "cpu")
    assert "correctness gate: full recompute" in output and "first token" not in output


def test_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ("--segments", "1,2", "--tokens", "30", "--repeats", 1)
    output, report = measured(tmp_path, "gpu", "model", "--device", "cpu", *small)
    assert MEANINGLESS in output
    results = report["results"]
    assert [(p["prompt"]["segments"], p["prompt"]["length"]) for p in results["points"]] == [(1, 30), (2, 30)]
    # Head and tail of each segment, and the query.
    assert [p["rows"] for p in results["points"]] == [16 + 8, 32 + 8]
    assert set(results["points"][0]["seconds"]) == set(KINDS)
    assert [m["tokens"] for m in results["marginals"]] == [30]
    assert [d["layer"] for d in results["drift"]["layers"]] == [0, 1, 2]
    assert results["aims"] == []


def test_answers_that_cannot_be_right_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the shapes that are timed, after the gate on the tiny model has passed."""
    small = ("--device", "cpu", "--segments", "2", "--tokens", "40")
    monkeypatch.setattr(gate, "check_model", lambda *_, **__: [gate.Distance("x", 0.0, 1.0)])
    right = Composition.operations
    with monkeypatch.context() as patch:
        patch.setattr(Composition, "operations", lambda self, mode=None: right(self, Mode.ADD))
        assert "2 x 40, state of layer 0 from full recompute's" in failed("gpu", "model", *small)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda a, b: False)
        assert "2 x 40: the warm answer differs from the cold answer" in failed("gpu", "model", *small)


def test_one_more_segment_and_aims() -> None:
    spread = Spread.of
    points = [
        PromptTimes(
            Composition(n, 4096, 64),
            0,
            {"full": spread([0.05 * n]), "cold": spread([0.052 * n]), "warm": spread([0.01 + 0.0005 * n])},
            *(0.0, 1.0, 0.0),
        )
        for n in (2, 4, 8)
    ]
    alone = {4096: spread([0.04]), 512: spread([0.01])}
    [marginal] = _marginals(points, alone)  # of 512 tokens there is nothing to fit
    assert marginal.warm == pytest.approx(0.0005) and marginal.full == pytest.approx(0.05)
    assert marginal.of_alone == pytest.approx(0.0125)
    aims = _aims(points, [marginal])
    assert [a.reached for a in aims] == [True, True, True]
    assert aims[0].value == pytest.approx(0.2 / 0.012) and aims[1].value == pytest.approx(1.04)
    assert not Aim("x", 9.9, 10, True).reached and not Aim("x", 1.06, 1.05, False).reached
