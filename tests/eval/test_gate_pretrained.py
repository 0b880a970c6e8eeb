"""The gate on pretrained weights: the default of dense models is a go, records that have seen nothing (link
``block``) are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from vllm_hypic.cli import main
from vllm_hypic.eval.gate import command
from vllm_hypic.eval.gate.criteria import ANSWERS, DISTRIBUTIONS, FAULTS, TEXTS
from vllm_hypic.eval.gate.measure import GateMeasurement, Place
from vllm_hypic.eval.gate.signoff import SignOff, read
from vllm_hypic.eval.gate.verdict import Verdict
from vllm_hypic.eval.methods import Method
from vllm_hypic.primitives.options import LinkDefaults

pytestmark = pytest.mark.engine

DTYPE = "auto" if torch.cpu._is_avx512_bf16_supported() else "float32"
"""The model's own bf16 takes CPUs without AVX512-BF16 many times longer."""
BLOCK = Method("block", "block", 8)
DEFAULTS = {"hypic": LinkDefaults("hypic", 8, "text", "query-15-96"), "block": LinkDefaults("block", 8)}


@dataclass(frozen=True)
class Judged:
    sign_off: SignOff
    said: str
    exit_code: int

    @property
    def against(self) -> set[str]:
        return {reason.criterion for reason in self.sign_off.judgement.against}

    def numbers(self, what: str) -> Any:
        return self.sign_off.evidence["numbers"][what]


def judged(model: Path, folder: Path, prompts: int) -> dict[str, Judged]:
    """The command's verdicts by link method; engines are started once, and measure both."""
    measured: list[GateMeasurement] = []
    measure: Callable[..., GateMeasurement] = command.measure

    def once(place: Place, methods: Sequence[Method], *args: Any, **options: Any) -> GateMeasurement:
        if not measured:
            measured.append(measure(place, (*methods, BLOCK), *args, **options))
        [method] = [m.on(DEFAULTS[m.link or ""]) for m in methods]
        return replace(measured[0], numbers={method: measured[0].numbers[method]})

    def gate(link: str, *more: str) -> Judged:
        arguments = ["gate", str(model), "--prompts", str(prompts), "--folder", str(folder / link), *more]
        arguments += ["--dtype", DTYPE, "--eager", "--threads", "1", "--kv-gib", "0.5", "--timeout-s", "400"]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        [path] = (folder / link).iterdir()
        return Judged(read(path), " ".join(result.output.split()), result.exit_code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", once)
        return {"hypic": gate("hypic"), "block": gate("block", "--link", "block")}


def test_a_few_prompts_tell_them_apart(smollm2: Path, tmp_path: Path) -> None:
    found = judged(smollm2, tmp_path, prompts=8)
    assert found["block"].exit_code == 1 and found["block"].sign_off.judgement.verdict is Verdict.NO_GO
    default = found["hypic"]
    assert "hypic-8/text/query-15-96" in default.said and not default.against & {FAULTS, TEXTS}
    assert default.numbers("distances")["kl_mean"] < found["block"].numbers("distances")["kl_mean"] / 2


@pytest.mark.slow
@pytest.mark.timeout(4800)
def test_the_default_is_a_go_and_blocks_are_a_no_go(smollm2: Path, tmp_path: Path) -> None:
    """Blocks by answers, by first tokens, and by every token of a text."""
    found = judged(smollm2, tmp_path, prompts=80)
    default, blocks = found["hypic"], found["block"]
    assert default.sign_off.judgement.verdict is Verdict.GO, default.said
    assert default.exit_code == 0 and default.sign_off.subject.options["islands"] == "query-15-96"
    assert blocks.exit_code == 1 and blocks.sign_off.judgement.verdict is Verdict.NO_GO
    assert {ANSWERS, TEXTS, DISTRIBUTIONS} <= blocks.against
    texts = [r for r in blocks.sign_off.judgement.reasons if r.criterion == TEXTS]
    assert [r.says.split(":")[0] for r in texts] == ["in-order", "mixed"]
    assert "nats a token recomputed" in blocks.said and "at most 2 % more may be" in blocks.said
    assert blocks.sign_off.evidence["tasks"]["chat"] is not None, "asked through its chat template"
    assert blocks.sign_off.evidence["tasks"]["texts"], "the installed texts that were read are named"
    [answers] = blocks.numbers("answers")
    assert 50 <= answers["full"] <= 95, "questions that full recompute answers, but not all"
    assert answers["loss"]["low"] > 1
    assert "fixed set, right:" in blocks.said and "are for certain" in blocks.said
