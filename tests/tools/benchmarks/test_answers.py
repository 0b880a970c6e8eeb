"""The plot of what several runs of the evaluation found."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run, words

from benchmarks.answers.plot import _mean, _merged, _questions


def estimate(value: float, half: float = 2.0) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half, "n": 300}


def cell(method: str, lost: float, computed: int) -> dict[str, Any]:
    score = {"mean": estimate(80 - lost), "difference": estimate(-lost)}
    return {"method": method, "prompt_tokens": 200.0, "computed_tokens": computed, "contains": score}


def family(name: str, **lost: float) -> dict[str, Any]:
    cells = [cell("full recompute", 0, 200), *(cell(m, n, 50) for m, n in lost.items())]
    return {"family": name, "prompts": 300, "cells": cells}


def text() -> dict[str, Any]:
    same = {"nll": estimate(3), "prompt_tokens": 200.0, "computed_tokens": 20}
    increases = {"full recompute": 0, "block": 4}
    cells = [{"method": m, "increase": estimate(n), **same} for m, n in increases.items()]
    return {"family": "mixed", "prompts": 300, "cells": cells}


def report(path: Path, model: str = "mine", **results: Any) -> str:
    path.write_text(json.dumps({"settings": {"model": model}, "results": results}))
    return str(path)


def test_reports_are_drawn_unless_they_cannot_stand_together(tmp_path: Path) -> None:
    one = report(tmp_path / "1.json", families=[family("facts", block=40)])
    two = report(tmp_path / "2.json", families=[family("updates", block=20)], texts=[text()])
    plot = ("--plot", tmp_path / "plot.png")
    drawn = run("plot-answers", one, two, *plot)
    assert (drawn.exit_code, drawn.output.strip()) == (0, "")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    mine, other = (report(tmp_path / f"{m}.json", m, families=[family("f", block=1)]) for m in ("a", "b"))
    (tmp_path / "c.json").write_text("{}")
    for reports, says in (
        ((mine, other), "reports of several models: a, b"),
        ((tmp_path / "c.json",), "c.json: no report of python -m benchmarks.answers: KeyError('settings')"),
    ):
        refused = run("plot-answers", *reports, *plot)
        assert refused.exit_code == 2 and says in words(refused)


def test_a_family_of_two_reports_is_one_panel() -> None:
    [facts, updates] = _merged(
        _questions, [family("facts", block=40), family("updates", block=20), family("facts", other=3)]
    )
    assert [(p.method, p.y.value) for p in facts.points] == [("block", -40), ("other", -3)]
    assert [p.method for p in updates.points] == ["block"]


def test_families_count_alike_and_a_method_must_be_in_all() -> None:
    panel = _mean([_questions(family("facts", block=40, naive=1)), _questions(family("updates", block=20))])
    [point] = panel.points
    assert (point.method, point.x, point.y.value) == ("block", 25, -30)
    assert point.y.high - point.y.low == pytest.approx(4 / 2**0.5)
