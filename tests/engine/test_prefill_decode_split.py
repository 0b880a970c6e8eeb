"""One engine prefills, another decodes; vLLM's NIXL connector moves blocks of plain requests between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle.models import random_segments

from vllm_hypic.harness.processes import free_port

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, answer_of, metrics, prompt, same, sampling_params

PLAIN, ONE, TWO = random_segments([700, 250, 180], seed=95)
(QUERY,) = random_segments([40], seed=96)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def transferring(llm: Any, ask: Ask, transfer: dict[str, Any] | None) -> tuple[Answer, dict[str, Any] | None]:
    """Answer a request with these ``kv_transfer_params``; what the engine says of its blocks."""
    params = sampling_params(ask)
    params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
    llm.llm_engine.add_request("split", {"prompt_token_ids": list(ask.tokens)}, params)
    while True:
        for output in llm.llm_engine.step():
            if output.finished:
                return answer_of(output), output.kv_transfer_params


def split(prefill: Engine, decode: Engine, ask: Ask) -> tuple[Answer, dict[str, Any] | None]:
    """The decoding engine's answer, and what it was told of the other's blocks."""
    first = Ask(ask.tokens, 1, ask.extra, ask.salt, ask.sampling)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    _, blocks = prefill.call(transferring, first, asked, timeout=60)
    return decode.call(transferring, ask, blocks, timeout=60)[0], blocks


def pair(start: EngineFactory, model: Path, **options: Any) -> tuple[Engine, Engine]:
    options |= {"kv_transfer_config": NIXL, "disable_log_stats": False}
    one, other = (
        start(model, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}, **options) for _ in range(2)
    )
    return one, other


def from_elsewhere(llm: Any) -> float:
    """Tokens whose blocks another engine sent."""
    return metrics(llm)["vllm:external_prefix_cache_hits"]


@pytest.mark.slow
def test_plain_requests_are_split_as_by_stock_engines_and_composed_ones_computed_where_they_decode(
    start_engine: EngineFactory, hybrid_model: Path
) -> None:
    plain, composed = Ask(tuple(PLAIN)), Ask(prompt(ONE, TWO, query=QUERY))
    stock = pair(start_engine, hybrid_model, hypic=False)
    (expected, _), loaded = split(*stock, plain), stock[1].call(from_elsewhere)
    for engine in stock:
        engine.close()
    prefill, decode = pair(start_engine, hybrid_model)
    answer, blocks = split(prefill, decode, plain)
    assert same(answer, expected) and blocks is not None
    assert decode.call(from_elsewhere) == loaded == len(PLAIN) - 1
    (alone,) = prefill.ask(composed)
    for reused in (0, len(ONE) + len(TWO) - 32):
        answer, blocks = split(prefill, decode, composed)
        assert same(answer, alone) and blocks is None
        assert answer.cached == reused
    assert decode.call(from_elsewhere) == loaded, "blocks of a composed request were moved"
    assert decode.call(metrics)["vllm:hypic_segments_computed"] == 2
