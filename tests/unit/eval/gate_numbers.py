"""Planted numbers and subjects for tests of the gate."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm_hypic.config.engine import TOKENIZER_MODE, HypicConfig
from vllm_hypic.eval.gate.criteria import Answers, Distances, Numbers, Reuse
from vllm_hypic.eval.gate.identity import Subject, telling

FINE = Distances(96, 5e-5, 4e-3, 2e-3, agreement=100.0, sure=95, changed=0.0)
NOISE = Distances(96, 8e-6, 3e-4, 3e-4, agreement=100.0, sure=95, changed=0.0)


def answers(
    prompts: int = 96, right: int = 92, *, name: str = "fixed set", lost: int = 0, gained: int = 0
) -> Answers:
    """Of full recompute ``right`` are right, of which reuse loses some; it gains others."""
    full = [1.0] * right + [0.0] * (prompts - right)
    reuse = [0.0] * lost + full[lost:right] + [1.0] * gained + full[right + gained :]
    return Answers.of(name, "exact match", full, reuse)


def numbers(**changed: Any) -> Numbers:
    """Numbers of a go, but for what is changed."""
    go = Numbers(answers=(answers(),), reuse=Reuse(3000, 3000), distances=FINE, noise=NOISE)
    return replace(go, **changed)


def model(*, dense: bool = False) -> Any:
    """What the gate reads of a model's configuration."""
    return SimpleNamespace(
        model="/models/mine",
        revision=None,
        trust_remote_code=False,
        is_hybrid=not dense,
        is_attention_free=False,
        tokenizer_mode=TOKENIZER_MODE,
    )


def engine_config(*, dense: bool = False, **more: Any) -> Any:
    """What the gate reads of an engine's configuration."""
    load = SimpleNamespace(load_format="auto")
    return SimpleNamespace(model_config=model(dense=dense), load_config=load, **more)


def subject(config: HypicConfig | None = None, **changed: Any) -> Subject:
    one = Subject(
        weights="0123",
        dtype="bfloat16",
        quantization=None,
        rope="null",
        overrides="{}",
        kv_dtype="bfloat16",
        state_dtype="auto",
        record_dtypes="T float16, S float32",
        plugin="0.1.0",
        vllm="0.32.0",
        options=telling((config or HypicConfig()).for_model(model())),
    )
    return replace(one, **changed)
