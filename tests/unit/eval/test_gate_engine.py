"""The gate on real engines, in a short form: go for the demo model, no-go where its link is broken.  And
servers that ask for the sign-off."""

from pathlib import Path
from typing import Any

import pytest
from engine.engines import Engine, EngineError

from vllm_hypic.config.engine import config_of
from vllm_hypic.eval.gate.criteria import ANSWERS, DISTRIBUTIONS, FIRST_TOKENS, Verdict
from vllm_hypic.eval.methods import Method
from vllm_hypic.harness.generators import EXAMPLE

from .gating import Judged, gate, measuring_once

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
MODEL = EXAMPLE.parent / "hybrid-notes" / "model"  # a wrong state costs it answers
ALSO = Method("hypic-8", "hypic", 8), Method("naive-8", "naive", 8)
RUNS = {
    "structure": ("--hypic", '{"segment": {"mode": "structure", "min_tokens": 32, "newest_tokens": 0}}'),
    "naive": ("--link", "naive"),
    "hypic": (),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Judged]:
    """Verdicts by link method, or mode."""
    with measuring_once(*ALSO):
        return {name: gate(MODEL, folder, "--prompts", "24", *more) for name, more in RUNS.items()}


def test_the_demo_model_is_a_go(runs: dict[str, Judged]) -> None:
    one = runs["hypic"]
    assert one.exit_code == 0 and one.sign_off.judgement.verdict is Verdict.GO, one.said
    assert all(reason.holds for reason in one.sign_off.judgement.reasons)
    # Room on this side of the limits, and a noise floor that is one.
    assert one.numbers("answers")[0]["loss"]["value"] <= 0 and one.numbers("answers")[0]["full"] > 90
    assert 0 < one.numbers("noise")["kl_p90"] < one.numbers("distances")["kl_p90"] < 0.03
    assert one.numbers("reuse")["reused"] == one.numbers("reuse")["reusable"] > 0


def test_a_mode_is_judged_by_the_segments_that_it_finds(runs: dict[str, Judged]) -> None:
    found, separated = runs["structure"], runs["hypic"]
    assert "hypic-8@structure" in found.said
    # Pieces end a token earlier than what separators enclose; all are found.
    reuse = found.numbers("reuse")
    assert 0 < reuse["reused"] == reuse["reusable"] < separated.numbers("reuse")["reusable"]
    assert found.numbers("distances")["kl_p90"] < 0.03
    assert found.numbers("distances") != separated.numbers("distances")


def test_without_transitions_it_is_a_no_go_and_says_why(runs: dict[str, Judged]) -> None:
    one = runs["naive"]
    assert one.exit_code == 1 and one.sign_off.judgement.verdict is Verdict.NO_GO, one.said
    assert one.against == {ANSWERS, DISTRIBUTIONS, FIRST_TOKENS}
    assert one.numbers("distances")["kl_p90"] > 1
    assert "NO-GO" in one.said and "distributions:" in one.said


def start(folder: Path, log: Path, *, choose: bool = False, **options: Any) -> str:
    """Start and stop an engine that demands a go; its log's lines on the gate."""
    gate = {"require": "go", "folder": str(folder), "choose": choose}
    with Engine(MODEL, log, options={"gate": gate, **options}):
        pass
    lines = [line for line in log.read_text().splitlines() if "hypic gate" in line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.usefixtures("runs")
def test_a_server_that_demands_a_go_starts_with_one(folder: Path, tmp_path: Path) -> None:
    assert "hypic gate: go, signed off" in start(folder, tmp_path / "log")


@pytest.mark.usefixtures("runs")
def test_a_server_takes_what_is_signed_off(folder: Path, tmp_path: Path) -> None:
    gate = {"choose": True, "folder": str(folder)}
    with Engine(MODEL, tmp_path / "log", options={"gate": gate, "islands": "query-10"}) as engine:
        assert engine.call(served) == ("none", "none")
    with pytest.raises(EngineError, match="no context and islands are signed off as a go"):
        start(tmp_path, tmp_path / "log", choose=True)


def served(llm: Any) -> tuple[str, str]:
    config = config_of(llm.llm_engine.vllm_config)
    return config.context, config.islands


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("options", "says"),
    [({"link": "naive"}, "no-go, signed off"), ({"seam_tokens": 4}, "this model has no sign-off at")],
)
def test_a_server_that_demands_a_go_is_refused_without(
    folder: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError) as caught:
        start(folder, tmp_path / "log", **options)
    assert caught.value.kind == "ConfigError"
    assert f"hypic config: gate.require='go': {says}" in str(caught.value)
    assert f"run: vllm-hypic gate {MODEL} --dtype bfloat16 --hypic" in str(caught.value)
