"""Windows and sinks: architectures without an oracle of their own, and windows that hold everything."""

from functools import partial
from typing import Any

import pytest
import torch
from engine import tiny_models
from engine.conftest import EngineFactory
from engine.engines import Ask, prompt, same
from engine.test_contexts_and_islands import ISLANDS
from lib.oracle.models import save_windowed_model

from .contract import COMPOSED, QUERY, TEXT, THIRD, Models, first_token, largest
from .rows import FULL, SLIDING

MIXED = {"sliding_window": 64, "layer_types": [SLIDING, FULL]}
BOUND = 0.25
"""Two units of bfloat16 of these models' logits, which reach 30; measured: 0.17."""


@pytest.mark.fast("gpt-oss")  # layers with sinks
@pytest.mark.parametrize(
    ("model", "fields", "args"),
    [
        pytest.param("Mistral", {"sliding_window": 64}, {}, id="mistral"),
        # Layers with a window have another rotary base.
        pytest.param("Gemma3Text", MIXED, {}, id="gemma3"),
        pytest.param("Gemma3Text", MIXED, {"disable_hybrid_kv_cache_manager": True}, id="gemma3-one-group"),
        pytest.param("GptOss", MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}, id="gpt-oss"),
    ],
)
def test_windowed_architectures(
    model: str, fields: dict[str, Any], args: dict[str, Any], start_engine: EngineFactory, models: Models
) -> None:
    """A record of the leading segment is exact whatever layers see of it; records of others are bit for bit
    what they were, cold and warm."""
    fields = {"num_hidden_layers": 2} | fields
    folder = models(model, partial(tiny_models.save, name=model, fields=fields, dtype=torch.bfloat16))
    with start_engine(folder, max_logprobs=-1, enable_prefix_caching=False, **args) as engine:
        lead = Ask(prompt(lead=THIRD, query=QUERY))
        plain = first_token(engine, lead.plain())
        assert largest(first_token(engine, lead), plain) <= BOUND
        assert largest(first_token(engine, Ask(prompt(lead=THIRD[:-1], query=QUERY))), plain) > BOUND
        engine.reset()
        cold, warm = engine.ask_one_by_one(COMPOSED, COMPOSED)
        assert warm.cached > cold.cached == 0 and same(cold, warm)


@pytest.mark.slow
def test_a_window_that_holds_the_prompt_changes_no_bit(start_engine: EngineFactory, models: Models) -> None:
    """Composed and plain requests, and generated tokens."""
    answers = []
    for kind in (FULL, SLIDING):
        save = partial(save_windowed_model, window=4096, layer_types=[kind] * 3)
        with start_engine(models(f"wide-{kind}", save)) as engine:
            composed = Ask(TEXT.asking().tokens, 6)
            islands = Ask(composed.tokens, 6, {"hypic_islands": ISLANDS})
            answers.append(engine.ask_one_by_one(composed, islands, composed.plain()))
    assert all(map(same, *answers))
