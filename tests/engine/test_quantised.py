"""vLLM's KV cache in FP8, and weights that are quantised: what stock keeps and computes is as in stock, and
records are FP8, too; beside e5m2 they have the model's dtype."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.instruction_sets import needs_avx512
from lib.oracle import random_segments

from vllm_hypic.pool.geometry import FP8

from .conftest import EngineFactory
from .engines import SEP, Ask, all_same, largest_distance, pool_unit_bytes, prompt, run_apart, same, worker_of
from .quantised_weights import SCHEMES, save_quantised
from .test_exactness import DEMO_SEP, demo_questions
from .test_store import MEMORY, cold_warm_and_loaded, on_disk, stored

pytestmark = needs_avx512

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
    made = (prompt(*docs, lead=system, query=question) for system, docs, question in demo_questions(count))
    return [Ask(tuple(DEMO_SEP if t == SEP else t for t in tokens), 6, sampling=STOP) for tokens in made]


def test_a_trained_hybrid_answers_as_without(start_engine: EngineFactory, demo_model: Path) -> None:
    asks, options = questions(8), {"token_texts": {"sep": "<sep>"}}
    plain = Ask(tuple(t for t in asks[0].tokens if t != DEMO_SEP), 6, sampling=STOP)
    with start_engine(demo_model, options=options) as exact:
        expected = exact.ask_one_by_one(*asks)
        exact_page, _ = exact.call(pool_unit_bytes)
    (of_stock,) = start_engine(demo_model, hypic=False, kv_cache_dtype="fp8").ask_and_close(plain)
    with start_engine(demo_model, options=options | stored(MEMORY), kv_cache_dtype="fp8") as ours:
        found, *_ = cold_warm_and_loaded(ours, asks)
        (ordinary,) = ours.ask(plain)
        assert ours.call(record_dtypes) == {FP8}
        page, _ = ours.call(pool_unit_bytes)
    assert 2 * page == exact_page
    assert same(ordinary, of_stock)
    assert [a.tokens for a in found] == [a.tokens for a in expected]
    assert largest_distance(found, expected) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "float32"), ("fp8_e5m2", "bfloat16")])
def test_cold_and_warm(kind: str, dtype: str, start_engine: EngineFactory, attention_model: Path) -> None:
    plain = ASKS[0].plain()
    start = partial(start_engine, attention_model, dtype=dtype, kv_cache_dtype=kind)
    (of_stock,) = start(hypic=False).ask_and_close(plain)
    with start() as ours:
        cold, warm = ours.ask_one_by_one(*ASKS), ours.ask_one_by_one(*ASKS)
        assert ours.call(record_dtypes) == {FP8 if kind == "fp8" else getattr(torch, dtype)}
        full, ordinary = ours.ask_one_by_one(Ask(ASKS[0].tokens, 12, {"hypic_link": "full"}), plain)
    assert all_same(cold, warm)
    assert same(ordinary, of_stock) and full.tokens == of_stock.tokens


def test_composed_answers_are_as_near_as_full_ones(
    start_engine: EngineFactory, attention_model: Path
) -> None:
    """To those of an engine in float32 without FP8, with a model's scales; a fault of records is far off."""
    full = [Ask(ask.tokens, extra={"hypic_link": "full"}) for ask in ASKS]
    expected = start_engine(attention_model, dtype="float32").ask_and_close(*ASKS, *full)
    with start_engine(attention_model, kv_cache_dtype="fp8", mended=with_scales, dtype="float32") as ours:
        assert ours.call(scales) == {SCALES}
        found = ours.ask_one_by_one(*ASKS, *full)
        ours.call(double_values)
        faulty = ours.ask_one_by_one(*ASKS)

    exact = expected[: len(ASKS)]
    stock = largest_distance(found[len(ASKS) :], expected[len(ASKS) :])
    far, fault = largest_distance(found[: len(ASKS)], exact), largest_distance(faulty, exact)
    numbers = f"in full {stock:.2f}, composed {far:.2f}, values twice as large {fault:.2f}"
    assert far < 2 * stock < fault, numbers


WEIGHTS_ROUNDING = {"awq": ("float16", 0.12), "gptq": ("float16", 0.12), "w8a8": ("bfloat16", 0.4)}
"""The model's dtype, and how far in logprobs answers of quantised weights may be from those of the weights
that they stand for.  The last quantises activations, too, and vLLM's kernel of it ends the process in
float16."""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.fast("awq")
def test_quantised_weights(
    scheme: str, start_engine: EngineFactory, attention_model: Path, engine_logs: Path, tmp_path: Path
) -> None:
    quantised = run_apart(save_quantised, attention_model, tmp_path, scheme, log=engine_logs / "models.log")
    lead, a, b, c, query = random_segments([40, 96, 130, 70, 18], vocab=480, seed=11)
    asked = Ask(prompt(a, b, c, lead=lead, query=query))
    again = Ask(prompt(c, a, b, lead=lead, query=query))
    dtype, rounding = WEIGHTS_ROUNDING[scheme]
    plain, full = asked.plain(), Ask(asked.tokens, extra={"hypic_link": "full"})
    args = {"dtype": dtype, "options": stored(on_disk(tmp_path / "disk"))}
    expected = start_engine(tmp_path / "read-back", **args).ask_and_close(asked, again, plain)
    (of_stock,) = start_engine(quantised, dtype=dtype, hypic=False).ask_and_close(plain)
    asks = asked, asked, again, full, plain
    cold, warm, reordered, whole, ordinary = start_engine(quantised, **args).ask_and_close(*asks)
    assert cold.cached == 0  # the records on disk are of other weights
    assert warm.cached == reordered.cached > 0
    assert same(cold, warm) and same(ordinary, of_stock)
    assert largest_distance((whole, warm, reordered, ordinary), (of_stock, *expected)) < rounding
    # So reuse that is wrong, or none, would show.
    assert largest_distance([warm], [of_stock]) > 2 * rounding
