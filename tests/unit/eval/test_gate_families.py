"""The gate's command on a tiny random model of every family.

Each is so shallow that what its records hold depends on nothing outside their segment, or is not heard. Then
joining them is full recompute: the gate must find rounding and no more, and far more where records are wrong.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import tiny_models
from engine.engines import worker_of
from lib.oracle import save_mla_model, save_olmo_model, save_short_conv_model
from lib.oracle.fla_models import save_fla_model
from lib.oracle.mamba_models import save_mamba_model
from lib.oracle.models import FULL, SLIDING, save_shared_kv_model

from benchmarks.lib.random_checkpoints import scale
from benchmarks.lib.random_kimi import save_kimi_model
from benchmarks.lib.random_ring import save_ring_model
from vllm_hypic.eval import runner
from vllm_hypic.eval.gate.command import Exit
from vllm_hypic.eval.gate.criteria import DISTRIBUTIONS, FAULTS, Verdict
from vllm_hypic.eval.methods import Method
from vllm_hypic.eval.task import Example
from vllm_hypic.harness.engines import Engine
from vllm_hypic.harness.generators import EXAMPLE

from .gating import Judged, gate, measuring_once

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDING = 2e-3
"""Nats that nine first tokens of ten may be away from full recompute's; measured: up to 5e-4, of reuse as of
noise.  Of what is wrong the gate's own limit, a hundred times as much, is exceeded: 0.29 to 2.2."""
NAIVE = Method("naive-8", "naive", 8)
"""Without transitions."""
EMPTIED = Method("seam-8-8", "seam-8-8")
"""For models that have none: the default's seams, but records hold zeros once they are made."""
LOUD = 8.0
SHALLOW = {"layers": 2, "silent": True}
PAIR = {"layer_types": ["linear_attention", FULL], "silent": True}
ONE = {"num_hidden_layers": 1}
SINKS = {"layer_types": [SLIDING], "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"name": "Gemma4Text", "num_hidden_layers": 2, "layer_types": [FULL, FULL]}
SHARED |= {"num_kv_shared_layers": 1, "window": 40}
"""The second layer reads K and V of the first."""


@dataclass(frozen=True)
class Family:
    """``save`` writes a model with ``fields``; ``wrong``: what the gate must see; ``loud``: weights that are
    made :data:`LOUD` times larger, else what the model says hardly depends on its records."""

    save: Callable[..., Any]
    fields: dict[str, Any]
    wrong: Method = NAIVE
    loud: str | None = None


FAMILIES = {
    "retnet": Family(save_fla_model, {"kind": "retnet"} | SHALLOW),
    "gla": Family(save_fla_model, {"kind": "gla"} | SHALLOW),
    "delta-net": Family(save_fla_model, SHALLOW),
    "olmo": Family(save_olmo_model, PAIR),
    "kimi": Family(save_kimi_model, PAIR),
    "lightning": Family(save_ring_model, SHALLOW),
    "mamba1": Family(save_mamba_model, {"name": "Jamba", "num_hidden_layers": 2, "silent": ("o_proj",)}),
    "mamba1-alone": Family(save_mamba_model, {"name": "Mamba"} | ONE, loud="backbone.layers.0.mixer.x_proj"),
    # Attention beside it, which is heard.
    "mamba2": Family(save_mamba_model, {"name": "FalconH1"} | ONE, loud="model.layers.0.mamba.conv1d"),
    "mamba2-alone": Family(save_mamba_model, {"name": "Mamba2"} | ONE, loud="backbone.layers.0.mixer.conv1d"),
    # Attention reads what convolutions make of two tokens before, which a seam covers.
    "short-convolutions": Family(
        save_short_conv_model, {"layer_types": ["conv", FULL]}, EMPTIED, "model.layers.1.self_attn.out_proj"
    ),
    "latents": Family(save_mla_model, {"layers": 1, "q_lora": True}, EMPTIED),
    "sinks": Family(tiny_models.save, {"name": "GptOss", "fields": ONE | SINKS}, EMPTIED),
    "shared-kv": Family(save_shared_kv_model, SHARED, EMPTIED, "model.layers.0.post_attention_layernorm"),
}


def empty(llm: Any) -> None:
    """Every record that the engine has."""
    pool = worker_of(llm).runtime.pool
    for kv in pool.kv.values():
        for part in kv.parts.values():
            part.zero_()
    for records in pool.linear.values():
        for part in records.parts:
            part.zero_()


def judged(family: Family, folder: Path, patch: pytest.MonkeyPatch) -> list[Judged]:
    """Verdicts on the default and on what is wrong."""
    prepare = runner.prepare

    def prepare_or_empty(engine: Engine, method: Method, group: Sequence[Example]) -> None:
        prepare(engine, method, group)
        if method == EMPTIED:
            engine.call(empty)

    patch.setattr(runner, "prepare", prepare_or_empty)
    small = ("--prompts", "8", "--kv-gib", "0.25")
    with measuring_once(family.wrong):
        links = ("hypic", family.wrong.link or "")
        return [gate(folder / "model", folder / link, "--link", link, *small) for link in links]


def with_questions(family: Family, folder: Path) -> None:
    """A model in the words of the demo model, whose questions it is asked."""
    model = folder / "model"
    family.save(model, **family.fields)
    if family.loud is not None:
        scale(model, [family.loud], LOUD)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / "model" / name, model)
    (folder / "gen.py").symlink_to(EXAMPLE / "gen.py")


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_records_are_told_from_right_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_questions(FAMILIES[name], tmp_path)
    right, wrong = both = judged(FAMILIES[name], tmp_path, monkeypatch)
    for one in both:
        assert one.holds(FAULTS) and not one.numbers("faults"), one.said  # cold is warm, bit for bit
        assert one.numbers("reuse")["reused"] >= one.numbers("reuse")["reusable"] > 0
        # A random model answers no question.
        assert one.exit_code == Exit.CANNOT_JUDGE, one.said
        assert one.sign_off.judgement.verdict is Verdict.CANNOT_JUDGE
        assert one.numbers("noise")["kl_p90"] <= ROUNDING
    assert right.numbers("distances")["kl_p90"] <= ROUNDING and right.holds(DISTRIBUTIONS), right.said
    assert not wrong.holds(DISTRIBUTIONS), wrong.said
