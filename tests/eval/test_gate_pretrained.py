"""The gate on pretrained weights: records that have seen nothing (link ``block``) are a no-go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from vllm_hypic.cli import main
from vllm_hypic.eval.gate.criteria import ANSWERS, DISTRIBUTIONS, TEXTS
from vllm_hypic.eval.gate.signoff import SignOff, read
from vllm_hypic.eval.gate.verdict import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DTYPE = "auto" if torch.cpu._is_avx512_bf16_supported() else "float32"
"""The model's own bf16 takes CPUs without AVX512-BF16 many times longer."""


def gate(model: Path, folder: Path, *, prompts: int) -> tuple[SignOff, str]:
    """Its sign-off and what it printed; it must say no-go."""
    result = CliRunner().invoke(
        main,
        [
            *("gate", str(model), "--link", "block", "--prompts", str(prompts), "--folder", str(folder)),
            *("--dtype", DTYPE, "--eager", "--threads", "1", "--kv-gib", "0.5", "--timeout-s", "400"),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 1, result.output
    [path] = folder.iterdir()
    sign_off = read(path)
    assert sign_off.judgement.verdict is Verdict.NO_GO
    return sign_off, " ".join(result.output.split())


@pytest.mark.timeout(4800)
def test_blocks_are_a_no_go(smollm2: Path, tmp_path: Path) -> None:
    """By answers, by first tokens, and by every token of a text."""
    sign_off, said = gate(smollm2, tmp_path, prompts=60)
    assert {ANSWERS, TEXTS, DISTRIBUTIONS} <= {r.criterion for r in sign_off.judgement.against}
    texts = [r for r in sign_off.judgement.reasons if r.criterion == TEXTS]
    assert [r.says.split(":")[0] for r in texts] == ["in-order", "mixed"]
    assert "nats a token recomputed" in said and "at most 2 % more may be" in said
    assert sign_off.evidence["tasks"]["chat"] is not None, "asked through its chat template"
    assert sign_off.evidence["tasks"]["texts"], "the installed texts that were read are named"
    [answers] = sign_off.evidence["numbers"]["answers"]
    assert 50 <= answers["full"] <= 95, "questions that full recompute answers, but not all"
    assert answers["loss"]["low"] > 1
    assert "fixed set, right:" in said and "are for certain" in said
