"""The gate on real engines, in a short form: go for the demo model, no-go where its link is broken.  And
servers that ask for the sign-off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from engine.engines import Engine, EngineError

from vllm_hypic.cli import main
from vllm_hypic.config.engine import config_of
from vllm_hypic.eval.gate import command
from vllm_hypic.eval.gate.criteria import ANSWERS, DISTRIBUTIONS, FIRST_TOKENS
from vllm_hypic.eval.gate.measure import GateMeasurement, Place
from vllm_hypic.eval.gate.signoff import SignOff, read
from vllm_hypic.eval.gate.verdict import Verdict
from vllm_hypic.eval.methods import Method
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.options import LinkDefaults

pytestmark = pytest.mark.engine
MODEL = EXAMPLE.parent / "hybrid-notes" / "model"  # a wrong state costs it answers
HYPIC, NAIVE = Method("hypic-8", "hypic", 8), Method("naive-8", "naive", 8)
STRUCTURE = Method("hypic-8@structure", "hypic", 8, mode="structure")
DEFAULTS = LinkDefaults("hypic", 8)
"""What this model has where nothing is named."""
MODE = ("--hypic", '{"segment": {"mode": "structure", "min_tokens": 32, "newest_tokens": 0}}')
SHORT = ("--prompts", "24", "--eager", "--threads", "1", "--kv-gib", "0.5", "--timeout-s", "400")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Measurements by link method, or mode; engines are started once, and measure all."""
    measured: list[GateMeasurement] = []

    def once(place: Place, methods: Sequence[Method], *args: Any, **options: Any) -> GateMeasurement:
        if not measured:
            measured.append(_measure(place, (STRUCTURE, HYPIC, NAIVE), *args, **options))
        asked = [method.on(DEFAULTS) for method in methods]
        return replace(measured[0], numbers={method: measured[0].numbers[method] for method in asked})

    _measure: Callable[..., GateMeasurement] = command.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", once)
        arguments = ["gate", str(MODEL), *SHORT, "--folder", str(folder)]
        return {
            link: CliRunner().invoke(main, [*arguments, *more], catch_exceptions=False)
            for link, more in {"structure": MODE, "naive": ("--link", "naive"), "hypic": ()}.items()
        }


def sign_off(folder: Path, link: str, mode: str | None = None) -> SignOff:
    [found] = [
        s
        for s in map(read, folder.iterdir())
        if s.subject.options["link"] == link and s.subject.options.get("segment", {}).get("mode") == mode
    ]
    return found


def test_the_demo_model_is_a_go(runs: dict[str, Result], folder: Path) -> None:
    assert runs["hypic"].exit_code == 0, runs["hypic"].output
    one = sign_off(folder, "hypic")
    assert one.judgement.verdict is Verdict.GO
    assert all(reason.holds for reason in one.judgement.reasons)
    numbers = one.evidence["numbers"]
    # Room on this side of the limits, and a noise floor that is one.
    assert numbers["answers"][0]["loss"]["value"] <= 0 and numbers["answers"][0]["full"] > 90
    assert 0 < numbers["noise"]["kl_p90"] < numbers["distances"]["kl_p90"] < 0.03
    assert numbers["reuse"]["reused"] == numbers["reuse"]["reusable"] > 0


def test_a_mode_is_judged_by_the_segments_that_it_finds(runs: dict[str, Result], folder: Path) -> None:
    assert "hypic-8@structure" in runs["structure"].output
    numbers = sign_off(folder, "hypic", "structure").evidence["numbers"]
    separated = sign_off(folder, "hypic").evidence["numbers"]
    # Pieces end a token earlier than what separators enclose; all are found.
    assert 0 < numbers["reuse"]["reused"] == numbers["reuse"]["reusable"] < separated["reuse"]["reusable"]
    assert numbers["distances"]["kl_p90"] < 0.03 and numbers["distances"] != separated["distances"]


def test_without_transitions_it_is_a_no_go_and_says_why(runs: dict[str, Result], folder: Path) -> None:
    assert runs["naive"].exit_code == 1, runs["naive"].output
    one = sign_off(folder, "naive")
    assert one.judgement.verdict is Verdict.NO_GO
    assert {r.criterion for r in one.judgement.against} == {ANSWERS, DISTRIBUTIONS, FIRST_TOKENS}
    assert one.evidence["numbers"]["distances"]["kl_p90"] > 1
    assert "NO-GO" in runs["naive"].output and "distributions:" in runs["naive"].output


def start(folder: Path, log: Path, *, choose: bool = False, **options: Any) -> str:
    """Start and stop an engine that demands a go; its log's lines on the gate."""
    gate = {"require": "go", "folder": str(folder), "choose": choose}
    with Engine(MODEL, log, options={"gate": gate, **options}):
        pass
    lines = [line for line in log.read_text().splitlines() if "hypic gate" in line]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_server_that_demands_a_go_starts_with_one(
    runs: dict[str, Result], folder: Path, tmp_path: Path
) -> None:
    assert "hypic gate: go, signed off" in start(folder, tmp_path / "log")


def test_a_server_takes_what_is_signed_off(runs: dict[str, Result], folder: Path, tmp_path: Path) -> None:
    gate = {"choose": True, "folder": str(folder)}
    with Engine(MODEL, tmp_path / "log", options={"gate": gate, "islands": "query-10"}) as engine:
        assert engine.call(served) == ("none", "none")
    with pytest.raises(EngineError, match="no context and islands are signed off as a go"):
        start(tmp_path, tmp_path / "log", choose=True)


def served(llm: Any) -> tuple[str, str]:
    config = config_of(llm.llm_engine.vllm_config)
    return config.context, config.islands


@pytest.mark.parametrize(
    ("options", "says"),
    [({"link": "naive"}, "no-go, signed off"), ({"seam_tokens": 4}, "nobody has checked")],
)
def test_a_server_that_demands_a_go_is_refused_without(
    runs: dict[str, Result], folder: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError) as caught:
        start(folder, tmp_path / "log", **options)
    assert caught.value.kind == "ConfigError"
    assert f"hypic config: gate.require='go': {says}" in str(caught.value)
    assert f"run: vllm-hypic gate {MODEL} --dtype bfloat16 --hypic" in str(caught.value)
