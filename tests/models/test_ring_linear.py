"""Ring-linear 2.0's class: what vLLM is told of it, and which configurations it refuses.

What it computes is held against an oracle in tests/families.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from vllm_hypic import models
from vllm_hypic.models import ring_linear
from vllm_hypic.patches.bailing_config import RingLinearConfig

ARCHITECTURE = "BailingMoeLinearV2ForCausalLM"
MINI: dict[str, Any] = {
    **{"architectures": [ARCHITECTURE], "hidden_size": 2048, "num_hidden_layers": 20, "head_dim": 128},
    **{"layer_group_size": 5, "num_attention_heads": 16, "num_key_value_heads": 4, "rope_scaling": None},
    **{"rope_theta": 1000000, "partial_rotary_factor": 0.5, "use_rmsnorm": True, "linear_silu": False},
}
"""Ring-mini-linear-2.0 says so, and more."""
ROTATION = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


def test_vllm_has_our_class_where_it_has_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {ARCHITECTURE: "vLLM's own", "LlamaForCausalLM": ModelRegistry.models["LlamaForCausalLM"]}
    monkeypatch.setattr(ModelRegistry, "models", known)
    models.register()
    assert known[ARCHITECTURE] == "vLLM's own"
    del known[ARCHITECTURE]
    models.register()
    models.register()
    assert known[ARCHITECTURE].load_model_cls() is ring_linear.RingLinearForCausalLM


def test_the_published_configuration_is_taken() -> None:
    assert not [*ring_linear._refusals(RingLinearConfig.from_dict(MINI))]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"num_hidden_layers": 22}, "num_hidden_layers=22: expected a multiple of layer_group_size=5"),
        ({"head_dim": 64}, "head_dim=64: expected hidden_size / num_attention_heads = 128"),
        ({"rotary_dim": 128}, "rotary_dim=128: expected partial_rotary_factor=0.5 of 128"),
        (
            {"rope_parameters": ROTATION, "partial_rotary_factor": 1.0},
            "partial_rotary_factor=0.5 in rope_parameters, 1.0 beside them: expected one value",
        ),
        ({"use_rmsnorm": False}, "use_rmsnorm=False: expected True"),
        ({"use_linear_gqa": True}, "use_linear_gqa=True: expected False"),
        ({"use_low_rank": True}, "use_low_rank=True: expected False"),
    ],
)
def test_others_are_refused(said: dict[str, Any], reason: str) -> None:
    assert [*ring_linear._refusals(RingLinearConfig.from_dict(MINI | said))] == [reason]
