"""The gate on pretrained weights: the default of dense models is a go, records that have seen nothing (link
``block``) are not."""

from pathlib import Path

import pytest

from benchmarks.lib.serving import fast_dtype
from vllm_hypic.eval.gate.criteria import ANSWERS, DISTRIBUTIONS, FAULTS, TEXTS, Verdict
from vllm_hypic.eval.methods import Method

from .gating import Judged, gate, measuring_once

pytestmark = pytest.mark.engine


def judged(model: Path, folder: Path, prompts: int) -> tuple[Judged, Judged]:
    """Verdicts on the default and on blocks."""
    small = ("--prompts", str(prompts), "--dtype", fast_dtype())
    with measuring_once(Method("block", "block", 8)):
        default = gate(model, folder / "hypic", *small)
        return default, gate(model, folder / "block", *small, "--link", "block")


@pytest.mark.timeout(1800)
def test_a_few_prompts_tell_them_apart(smollm2: Path, tmp_path: Path) -> None:
    default, blocks = judged(smollm2, tmp_path, prompts=8)
    assert blocks.exit_code == 1 and blocks.sign_off.judgement.verdict is Verdict.NO_GO
    assert "hypic-8/text/query-15-96" in default.said and not default.against & {FAULTS, TEXTS}
    assert default.numbers("distances")["kl_mean"] < blocks.numbers("distances")["kl_mean"] / 2


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_the_default_is_a_go_and_blocks_are_a_no_go(smollm2: Path, tmp_path: Path) -> None:
    """Blocks by answers, by first tokens, and by every token of a text."""
    default, blocks = judged(smollm2, tmp_path, prompts=80)
    assert default.sign_off.judgement.verdict is Verdict.GO, default.said
    assert default.exit_code == 0 and default.sign_off.subject.options["islands"] == "query-15-96"
    assert blocks.exit_code == 1 and blocks.sign_off.judgement.verdict is Verdict.NO_GO
    assert {ANSWERS, TEXTS, DISTRIBUTIONS} <= blocks.against
    texts = [r for r in blocks.sign_off.judgement.reasons if r.criterion == TEXTS]
    assert [r.says.split(":")[0] for r in texts] == ["in-order", "mixed"]
    said = " ".join(blocks.said.split())
    assert "nats a token recomputed" in said and "at most 2 % more is allowed" in said
    assert blocks.sign_off.evidence["tasks"]["chat"] is not None, "asked through its chat template"
    assert blocks.sign_off.evidence["tasks"]["texts"], "the installed texts that were read are named"
    [answers] = blocks.numbers("answers")
    assert 50 <= answers["full"] <= 95, "questions that full recompute answers, but not all"
    assert answers["loss"]["low"] > 1
    assert "fixed set, right:" in said and "are certainly lost" in said
