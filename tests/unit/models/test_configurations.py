"""Models that vLLM does not have: which of their configurations are read, completed, or refused by name.

What the models compute is held against oracles in tests/families.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.model_executor.models.registry import ModelRegistry

from vllm_hypic import models
from vllm_hypic.models import ring_linear
from vllm_hypic.models.fla_config import CONFIGS, FULL, LINEAR, DeltaNetConfig, GLAConfig, RetNetConfig
from vllm_hypic.patches.bailing_config import RingLinearConfig

PUBLISHED: dict[str, dict[str, Any]] = {
    # fla-hub/delta_net-1.3B-100B
    "delta_net": {
        **{"attn_mode": "chunk", "conv_size": 4, "hidden_act": "swish", "hidden_ratio": 4},
        **{"hidden_size": 2048, "intermediate_size": None, "num_heads": 16, "num_hidden_layers": 24},
        **{"qk_activation": "silu", "qk_norm": "l2", "use_beta": True, "use_gate": False},
        **{"use_output_norm": True, "use_short_conv": True, "vocab_size": 32000, "fuse_cross_entropy": True},
    },
    # fla-hub/retnet-1.3B-100B
    "retnet": {
        **{"attn_mode": "fused_chunk", "elementwise_affine": True, "expand_k": 1, "expand_v": 2},
        **{"feature_map": None, "hidden_act": "swish", "hidden_ratio": 2, "hidden_size": 2048},
        **{"intermediate_size": None, "num_heads": 8, "num_hidden_layers": 24, "num_kv_heads": None},
        **{"use_output_gate": True, "use_short_conv": False, "share_conv_kernel": True, "conv_size": 4},
    },
    # fla-hub/gla-1.3B-100B
    "gla": {
        **{"attn_mode": "chunk", "clamp_min": None, "elementwise_affine": True, "expand_k": 0.5},
        **{"expand_v": 1, "feature_map": None, "fuse_norm": True, "hidden_act": "swish", "hidden_ratio": 4},
        **{"hidden_size": 2048, "intermediate_size": None, "num_heads": 4, "num_hidden_layers": 24},
        **{"num_kv_heads": None, "use_gk": True, "use_gv": False, "use_output_gate": True},
    },
}
"""What published models say, and fields of their time."""


def read(folder: Path, kind: str, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **PUBLISHED[kind], **fields}))
    models.register()
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configurations_are_read(kind: str, tmp_path: Path) -> None:
    config = read(tmp_path, kind)
    assert type(config) in CONFIGS and config.intermediate_size % 256 == 0
    assert config.layer_types == [LINEAR] * 24 and config.attention is None
    attn = {"layers": [1, 3], "num_heads": 32, "num_kv_heads": 8, "qkv_bias": False, "rope_theta": 10000.0}
    for said in (attn, [attn]):
        hybrid = read(tmp_path, kind, attn=said)
        assert [i for i, layer in enumerate(hybrid.layer_types) if layer == FULL] == [1, 3]
        assert (hybrid.num_attention_heads, hybrid.num_key_value_heads, hybrid.head_dim) == (32, 8, 64)
    hybrid.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == hybrid.to_dict()


def test_mlps_are_two_thirds_of_a_ratio_in_steps_of_256() -> None:
    """As flash-linear-attention rounds."""
    for hidden, ratio, inner in ((2048, 4, 5632), (1024, 4, 2816), (2048, 2, 2816), (2048, None, 5632)):
        assert DeltaNetConfig(hidden_size=hidden, hidden_ratio=ratio).intermediate_size == inner
    assert DeltaNetConfig(intermediate_size=100).intermediate_size == 100


ATTN: dict[str, Any] = {"layers": [1], "num_heads": 16}


@pytest.mark.parametrize(
    ("kind", "said", "reason"),
    [
        (DeltaNetConfig, {"hidden_act": "powlu"}, "hidden_act='powlu': expected 'swish' or 'silu'"),
        (DeltaNetConfig, {"attnres_block_size": 4}, "attnres_block_size=4: expected None"),
        (DeltaNetConfig, {"use_beta": False}, "use_beta=False: expected True"),
        (DeltaNetConfig, {"qk_norm": "sum"}, "qk_norm='sum': expected 'l2'"),
        (DeltaNetConfig, {"qk_activation": "elu"}, "qk_activation='elu': expected 'silu'"),
        (DeltaNetConfig, {"num_heads": 24}, "expand_k=1.0: expected a multiple of num_heads=24 channels"),
        (DeltaNetConfig, {"attn": ATTN | {"window_size": 64}}, r"attn\['window_size'\]=64: expected None"),
        (DeltaNetConfig, {"attn": ATTN | {"layers": [1, 24]}}, r"holds \[24\]: expected layers below 24"),
        (DeltaNetConfig, {"attn": ATTN | {"num_heads": 24}}, "=24: expected a divisor of 2048"),
        (DeltaNetConfig, {"attn": {"layers": [1]}}, "expected the key 'num_heads'"),
        (DeltaNetConfig, {"attn": [ATTN, ATTN]}, "expected at most one entry"),
        (GLAConfig, {"feature_map": "relu"}, "feature_map='relu': expected None"),
        (GLAConfig, {"num_kv_heads": 2}, "num_kv_heads=2: expected num_heads=4"),
        (GLAConfig, {"elementwise_affine": False}, "elementwise_affine=False: expected True"),
        (RetNetConfig, {"use_short_conv": True}, "use_short_conv=True: expected False"),
    ],
)
def test_what_is_not_computed_is_refused(kind: type[Any], said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.model_type}: .*{reason}"):
        kind(**said)


# -- Ring-linear 2.0 --------------------------------------------------------------------------------

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
    # The published configuration is taken.
    assert not [*ring_linear._refusals(RingLinearConfig.from_dict(MINI))]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"num_hidden_layers": 22}, "num_hidden_layers=22: expected a multiple of layer_group_size=5"),
        ({"head_dim": 64}, "head_dim=64: expected hidden_size / num_attention_heads = 128"),
        ({"rotary_dim": 128}, "rotary_dim=128: expected partial_rotary_factor=0.5 of 128"),
        (
            {"rope_parameters": ROTATION, "partial_rotary_factor": 1.0},
            "partial_rotary_factor=0.5 in rope_parameters, 1.0 outside: expected equal values",
        ),
        ({"use_rmsnorm": False}, "use_rmsnorm=False: expected True"),
        ({"use_linear_gqa": True}, "use_linear_gqa=True: expected False"),
        ({"use_low_rank": True}, "use_low_rank=True: expected False"),
    ],
)
def test_other_ring_models_are_refused(said: dict[str, Any], reason: str) -> None:
    assert [*ring_linear._refusals(RingLinearConfig.from_dict(MINI | said))] == [reason]
