"""vLLM's KV cache in FP8: what stock keeps is as in stock, and records are FP8, too; beside e5m2 they have
the model's dtype."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_segments

from vllm_hypic.pool.geometry import FP8

from .conftest import EXAMPLES, EngineFactory
from .engines import SEP, Answer, Ask, distance, pool_unit_bytes, prompt, same, worker_of
from .test_exactness import DEMO_SEP
from .test_store import MEMORY, computed, empty_pool, stored

STOP = {"ignore_eos": False}  # what follows an answer was never trained
ROUNDING = 0.25
"""Twice the largest distance seen of an answer with FP8 from the same answer with bfloat16."""

LEAD, A, B, C, QUERY = random_segments([40, 96, 330, 70, 18], vocab=480, seed=21)
ASKS = (
    Ask(prompt(A, B, C, lead=LEAD, query=QUERY), max_tokens=12),
    Ask(prompt(C, A, B, lead=LEAD, query=QUERY), max_tokens=12, extra={"hypic_link": "seam-24-8"}),
    # What it computes is longer than a short request, so that stock's operator computes the private part.
    Ask(prompt(A, C, lead=LEAD, query=[*B, *B]), max_tokens=12),
)


def record_dtypes(llm: Any) -> set[torch.dtype]:
    return {kv.key.dtype for kv in worker_of(llm).runtime.pool.kv.values()}


SCALES = 0.75, 2.5


def with_scales() -> None:
    """As a checkpoint does that has scales for its KV cache."""
    from vllm.model_executor.layers.attention import attention

    stock = attention.set_default_quant_scales

    def scaled(layer: Any, *args: Any, **named: Any) -> None:
        stock(layer, *args, **named)
        layer._k_scale_float, layer._v_scale_float = SCALES

    attention.set_default_quant_scales = scaled


def scales(llm: Any) -> set[tuple[float, float]]:
    return {(kv.key_scale, kv.value_scale) for kv in worker_of(llm).runtime.pool.kv.values()}


def double_values(llm: Any) -> None:
    """What records are whose scale is not what their numbers were divided by."""
    for kv in worker_of(llm).runtime.pool.kv.values():
        kv.value.copy_((2 * kv.value.float()).to(kv.value.dtype))
    assert llm.reset_prefix_cache()


def questions(count: int) -> list[Ask]:
    """Prompts of the demo model: a system prompt, eight documents, a question about one."""
    sys.path.insert(0, str(EXAMPLES / "models" / "tiny-hybrid-qa"))
    from gen import prompt as generate

    found = []
    for seed in range(count):
        made = generate(20_000_500 + seed, 8, 64, "one", facts=2)
        tokens = prompt(*made["docs"], lead=made["system"], query=made["question"])
        found.append(Ask(tuple(DEMO_SEP if t == SEP else t for t in tokens), 6, sampling=STOP))
    return found


def test_a_trained_hybrid_answers_as_without(start_engine: EngineFactory, demo_model: Path) -> None:
    asks, options = questions(8), {"tokens": {"sep": "<sep>"}}
    plain = Ask(tuple(t for t in asks[0].tokens if t != DEMO_SEP), 6, sampling=STOP)
    with start_engine(demo_model, options=options) as exact:
        expected = exact.ask_one_by_one(*asks)
        exact_page, _ = exact.call(pool_unit_bytes)
    with start_engine(demo_model, hypic=False, kv_cache_dtype="fp8") as stock:
        (of_stock,) = stock.ask(plain)
    with start_engine(demo_model, options=options | stored(MEMORY), kv_cache_dtype="fp8") as ours:
        cold, warm = ours.ask_one_by_one(*asks), ours.ask_one_by_one(*asks)
        (ordinary,) = ours.ask(plain)
        made = ours.call(computed)
        ours.call(empty_pool)
        loaded = ours.ask_one_by_one(*asks)
        assert ours.call(computed) == made, "a segment was computed again"
        assert ours.call(record_dtypes) == {FP8}
        page, _ = ours.call(pool_unit_bytes)
    assert 2 * page == exact_page
    assert same(ordinary, of_stock)
    for one, other, third in zip(cold, warm, loaded, strict=True):
        assert same(one, other) and same(one, third)
    for found, exactly in zip(warm, expected, strict=True):
        assert found.tokens == exactly.tokens
        assert distance(found, exactly) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "float32"), ("fp8_e5m2", "bfloat16")])
def test_cold_and_warm(kind: str, dtype: str, start_engine: EngineFactory, attention_model: Path) -> None:
    plain = ASKS[0].plain()
    with start_engine(attention_model, hypic=False, dtype=dtype, kv_cache_dtype=kind) as stock:
        (of_stock,) = stock.ask(plain)
    with start_engine(attention_model, dtype=dtype, kv_cache_dtype=kind) as ours:
        cold, warm = ours.ask_one_by_one(*ASKS), ours.ask_one_by_one(*ASKS)
        assert ours.call(record_dtypes) == {FP8 if kind == "fp8" else getattr(torch, dtype)}
        full, ordinary = ours.ask_one_by_one(Ask(ASKS[0].tokens, 12, {"hypic_link": "full"}), plain)
    assert all(same(one, other) for one, other in zip(cold, warm, strict=True))
    assert same(ordinary, of_stock) and full.tokens == of_stock.tokens


def test_composed_answers_are_as_near_as_full_ones(
    start_engine: EngineFactory, attention_model: Path
) -> None:
    """To those of an engine in float32 without FP8, with a model's scales; a fault of records is far off."""
    args: dict[str, Any] = {"dtype": "float32"}
    full = [Ask(ask.tokens, extra={"hypic_link": "full"}) for ask in ASKS]
    with start_engine(attention_model, **args) as exact:
        expected, expected_full = exact.ask_one_by_one(*ASKS), exact.ask_one_by_one(*full)
    with start_engine(attention_model, kv_cache_dtype="fp8", mended=with_scales, **args) as ours:
        assert ours.call(scales) == {SCALES}
        found, found_full = ours.ask_one_by_one(*ASKS), ours.ask_one_by_one(*full)
        ours.call(double_values)
        faulty = ours.ask_one_by_one(*ASKS)

    def furthest(some: list[Answer], others: list[Answer]) -> float:
        return max(distance(one, other) for one, other in zip(some, others, strict=True))

    stock, far, fault = (
        furthest(found_full, expected_full),
        furthest(found, expected),
        furthest(faulty, expected),
    )
    assert far < 2 * stock < fault, (
        f"in full {stock:.2f}, composed {far:.2f}, values twice as large {fault:.2f}"
    )
