"""SmolLM2 with sliding windows that ``hf_overrides`` switch on: real weights and text in windowed layers."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.oracle import Oracle
from transformers import AutoTokenizer, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from .conftest import EngineFactory
from .engines import Ask, Engine, all_same, run_apart
from .test_oracle_agreement import Distance, distance, first_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LICENSE = Path(__file__).parents[2] / "LICENSE"
SEPARATOR = "<file_sep>"
"""A token that the model's vocabulary has, and no licence."""
WINDOW = 160
WIDE = 2048
SEGMENTS = (40, 230, 210, 250, 60)
"""Leading segment, three interior segments, query."""
OPTIONS: dict[str, Any] = {"token_texts": {"sep": SEPARATOR}, "pool_bytes": 256 << 20}
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024}
EXACT, APART = 2e-3, 0.1
"""Largest difference of a logprob: by float32 at most, and by other windows at least."""

Overrides = dict[str, Any]


def windows(every: int, width: int, layers: int = 30) -> Overrides:
    """Configuration of every ``every``-th layer with a sliding window."""
    kinds = ["full_attention" if i % every else "sliding_attention" for i in range(layers)]
    return {"layer_types": kinds, "sliding_window": width}


@pytest.fixture(scope="module", params=[2, 1], ids=["every-second-layer", "all-layers"])
def every(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def parts(smollm2: Path) -> list[list[int]]:
    """Tokens of a licence, cut into :data:`SEGMENTS`."""
    ids = AutoTokenizer.from_pretrained(smollm2)(LICENSE.read_text())["input_ids"]
    ends = [sum(SEGMENTS[: i + 1]) for i in range(len(SEGMENTS))]
    return [ids[end - n : end] for end, n in zip(ends, SEGMENTS, strict=True)]


@pytest.fixture(scope="module")
def composed(smollm2: Path, parts: list[list[int]]) -> list[int]:
    separator = AutoTokenizer.from_pretrained(smollm2).convert_tokens_to_ids(SEPARATOR)
    return [token for part in parts for token in (*part, separator)][:-1]


@pytest.fixture(scope="module")
def engine(every: int, module_engine: EngineFactory, smollm2: Path) -> Iterator[Engine]:
    args = {"max_logprobs": -1, "hf_overrides": windows(every, WINDOW)}
    with module_engine(smollm2, options=OPTIONS, **SIZES, **args) as started:
        yield started


def by_transformers(folder: str, tokens: list[int], overrides: Overrides) -> torch.Tensor:
    """The next token's logprobs ``[vocabulary]`` by SmolLM3's forward: Llama's with windows by layer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = model.config.to_dict()
    shared = {k: own[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "rope_parameters")}
    shared |= {k: own[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    shared |= {k: own[k] for k in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")}
    shared |= {k: own[k] for k in ("pad_token_id", "bos_token_id", "eos_token_id")}
    rotated = [1] * own["num_hidden_layers"]
    config = SmolLM3Config(**shared, **overrides, use_sliding_window=True, no_rope_layers=rotated)
    config._attn_implementation = "eager"
    windowed = SmolLM3ForCausalLM(config)
    windowed.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = windowed.eval()(torch.tensor([tokens])).logits[0, -1]
    return logits.double().log_softmax(-1)


def test_prompts_beyond_a_window_agree_with_transformers(
    engine: Engine, every: int, smollm2: Path, parts: list[list[int]], engine_logs: Path
) -> None:
    log, tokens = engine_logs / "transformers.log", [*chain(*parts)]
    ours = first_token(engine, tokens)

    def largest(width: int) -> float:
        args = (by_transformers, str(smollm2), tokens, windows(every, width))
        return float((ours - run_apart(*args, log=log, timeout=600)).abs().max())

    assert largest(WINDOW) < EXACT
    assert largest(WIDE) > APART and largest(WINDOW - 1) > 2 * EXACT


@pytest.fixture(scope="module")
def oracle(every: int, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle")
    config = json.loads((smollm2 / "config.json").read_text()) | windows(every, WINDOW)
    (folder / "config.json").write_text(json.dumps(config))
    for file in smollm2.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    return Oracle(folder, torch.float32)


def test_records_in_windowed_layers_agree_with_the_oracle(
    engine: Engine, oracle: Oracle, parts: list[list[int]], composed: list[int]
) -> None:
    lead, *segments, query = parts
    ours = first_token(engine, composed)

    def far(fault: str | None = None) -> Distance:
        return distance([ours], [oracle.next_token_logprobs(lead, segments, query, fault=fault)])

    assert far().largest < EXACT
    assert far("stream_windows").largest > 10 * EXACT and far("public_without_windows").largest > 10 * EXACT


def test_a_window_that_holds_the_prompt_changes_no_bit(
    every: int, module_engine: EngineFactory, smollm2: Path, parts: list[list[int]], composed: list[int]
) -> None:
    """Against the model as it is: plain and composed prompts, and tokens generated behind them."""
    plain, marked = (Ask(tuple(tokens), 8) for tokens in (chain(*parts), composed))
    start = partial(module_engine, smollm2, options=OPTIONS, **SIZES)
    before, windowed = (
        start(hf_overrides=given).ask_and_close(plain, marked, marked) for given in ({}, windows(every, WIDE))
    )
    assert all_same(before, windowed) and windowed[2].cached > 0
