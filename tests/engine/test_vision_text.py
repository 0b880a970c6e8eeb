"""Models that see, asked about text, and other names of a class that is served.

Each checkpoint is written twice, whole and its language half alone, which the other suites hold against
oracles; prompts with segments and without get the same answers from both, up to what bfloat16 moves stock
vLLM's by between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import random_segments, save_mamba2_model

from .conftest import EngineFactory, Saver
from .engines import Ask, distance, largest_distance, prompt, same
from .tiny_models import config_of
from .tiny_vision import save_vision

LEAD, FIRST, SECOND, QUERY = random_segments([40, 150, 70, 21], vocab=480)
WHOLE_VOCABULARY = {"logprobs": -1}
COMPOSED = Ask(prompt(FIRST, SECOND, lead=LEAD, query=QUERY), sampling=WHOLE_VOCABULARY)
OTHER = Ask(prompt(SECOND, query=FIRST), sampling=WHOLE_VOCABULARY)
ASKS = (COMPOSED, OTHER, COMPOSED.plain())

BOUND = 0.15
"""On logprobs of the whole vocabulary; measured: below 0.05, as much between stock engines, and above 7
between two prompts."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MROPE = ROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
DELTA_NET = {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "rope_parameters": MROPE},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
CONVOLUTIONS = {
    **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    **{"head_dim": 32, "block_dim": 128, "conv_dim": 128},
}


@dataclass(frozen=True)
class Wrapper:
    """``save`` writes the model and its language half; ``architecture``: what the model says it is, where it
    is not what was written; ``args``: of its engine."""

    name: str
    save: Callable[..., object]
    architecture: str | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def seeing(path: Path, text_path: Path, **options: Any) -> None:
    save_vision(path, text_path=text_path, **options)


def twice(path: Path, text_path: Path) -> None:
    for folder in (path, text_path):
        save_mamba2_model(folder, name="NemotronH")


NO_IMAGES = {"limit_mm_per_prompt": {"image": 0}}
MINICPM = {"model_type": "qwen3_5_text", **DELTA_NET}
WRAPPERS = [
    # vLLM does not load the vision half as transformers 5.19 writes it.
    Wrapper("lfm2-vl", partial(seeing, name="Lfm2Vl", text=CONVOLUTIONS), args=NO_IMAGES),
    Wrapper("minicpm-v-4.6", partial(seeing, name="MiniCPMV4_6", text=MINICPM, norm_center=0)),
    Wrapper(
        "intern-s2-preview",
        partial(seeing, name="Qwen3_5Moe", text=DELTA_NET | EXPERTS, norm_center=0),
        "InternS2PreviewForConditionalGeneration",
    ),
    Wrapper("nemotron-h-puzzle", twice, "NemotronHPuzzleForCausalLM"),
]


@pytest.mark.parametrize("model", WRAPPERS, ids=str)
@pytest.mark.fast("minicpm-v-4.6")
def test_answers_are_those_of_the_language_half(
    model: Wrapper, start_engine: EngineFactory, saved: Saver, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    whole = saved(model.save, text)
    if model.architecture is not None:
        with config_of(whole) as config:
            config["architectures"] = [model.architecture]
    args: dict[str, Any] = {"max_logprobs": -1, "enable_prefix_caching": False}
    theirs = start_engine(text, **args).ask_and_close(*ASKS)
    with start_engine(whole, **args, **model.args) as engine:
        ours = engine.ask_one_by_one(*ASKS)
        (warm,) = engine.ask(COMPOSED)
    assert largest_distance(ours, theirs) <= BOUND
    assert distance(ours[0], theirs[1]) > 6 * BOUND, "another prompt goes unseen"
    assert warm.cached > 200 and same(warm, ours[0])
