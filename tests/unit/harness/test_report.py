"""What goes into a report, and how it is shown."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from benchmarks.lib import report
from vllm_hypic.harness.report import cpu_info

CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 2.0GHz
flags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16 unheard_of
"""


@dataclass(frozen=True)
class Inner:
    path: Path
    values: tuple[float, ...]


def test_a_report_says_where_it_comes_from() -> None:
    found = report.report("x", {"n": 1}, {"seconds": 2.0}, gate={"passed": True}, threads=3)
    assert found["benchmark"] == "x"
    assert found["machine"]["threads"] == 3
    assert found["machine"]["cpu"]
    assert found["machine"]["cores"] >= found["machine"]["cores_usable"] >= 1
    assert {"python", "vllm-hypic", "torch"} <= set(found["versions"])
    assert found["command"].startswith("python -m benchmarks")
    assert json.loads(json.dumps(found)) == found


def test_cpu_model_and_instruction_sets() -> None:
    assert cpu_info(CPUINFO) == {
        "model": "Some CPU @ 2.0GHz",
        "isa": ["avx2", "avx512f", "avx512_bf16", "amx_bf16"],
    }
    assert cpu_info("")["model"], "a CPU that says nothing still has a name"


def test_plain_values() -> None:
    value = {"a": Inner(Path("/home/somebody/model"), (1.0, float("nan"))), 3: None, "b": [True]}
    # Folders of the machine stay out.
    assert report.plain(value) == {"a": {"path": "model", "values": [1.0, None]}, "3": None, "b": [True]}
    with pytest.raises(TypeError, match="no place in a report"):
        report.plain({"a": object()})


def test_json_is_written_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    report.write_json(path, {"a": (1, 2)})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    assert list(tmp_path.iterdir()) == [path]


SECONDS = {0: "0.00 us", 4.15e-5: "41.5 us", 0.2321: "232 ms", 5.918: "5.92 s", 100.4: "100 s", -2: "-2.00 s"}
SIZES = {0: "0 B", 1000: "1000 B", 1536: "1.50 KiB", 3 * 2**30: "3.00 GiB"}


@pytest.mark.parametrize(("show", "cases"), [(report.seconds, SECONDS), (report.size, SIZES)])
def test_numbers_are_shown(show: Callable[[float], str], cases: dict[float, str]) -> None:
    assert {value: show(value) for value in cases} == cases


def test_outputs_are_checked_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.check_outputs(tmp_path / "a.json", tmp_path / "a.png")
    with pytest.raises(click.UsageError, match="there is no folder"):
        report.check_outputs(tmp_path / "missing" / "a.json", None)
    with pytest.raises(click.UsageError, match=r"use a\.png"):
        report.check_outputs(None, tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(click.UsageError, match=r"vllm-hypic\[bench\]"):
        report.check_outputs(None, tmp_path / "a.png")


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import Axes, Line, plot_bars, plot_lines

    line = Line("a", [1, 2], [3, 4], [2, 3], [5, 6])
    plot_lines(tmp_path / "lines.png", [Axes("t", "x", "y", [line], log_y=True, horizontal={"limit": 3})])
    bars = {"a": {"x": 1, "y": 2}, "b": {"x": 3}}
    plot_bars(tmp_path / "bars.png", bars, title="t", label="MiB", stacked=True)
    for name in ("lines.png", "bars.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
