"""Configurations by which docs/reference/models.md looks at architectures: defaults of transformers, or vLLM,
and what published models say beyond them."""

from __future__ import annotations

import json
from typing import Any

QWEN4_EXP = {
    **{"output_gate_type": "sigmoid", "eos_token_id": 1, "indexer_n_heads": 16, "indexer_head_dim": 128},
    **{"indexer_kv_heads": 1, "indexer_budget": 2048, "indexer_compress_ratio": 4, "ple_layer_ids": [1]},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
KIMI_LINEAR = {
    **{"dtype": "bfloat16", "mla_use_nope": True, "kv_lora_rank": 512, "q_lora_rank": None},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "linear_attn_config": {
        **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
        "kda_layers": [i for i in range(1, 28) if i % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24],
    },
}
LFM2 = {"block_dim": 2560, "conv_dim": 2560, "layer_types": ["conv", "full_attention"] * 16}
LING = {"dtype": "bfloat16", "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5.0}
GLM5_NEXT = {"mhc": True, "mla_use_nope": True, "swiglu_limit": 10.0, "indexer_rope_interleave": True}
# Without experts, of which vLLM has none for CPUs without a gate.
NEMOTRON_H = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 8}
NEMOTRONS_THAT_SEE = (
    *("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"),
    *("NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3"),
)
NEMOTRON_VISION = {
    **{"text_config": {"model_type": "nemotron_h", "dtype": "bfloat16", **NEMOTRON_H}},
    **{"force_image_size": 512, "patch_size": 16, "downsample_ratio": 0.5, "template": ""},
    **{"ps_version": "v2", "image_tag_type": "internvl"},
    **{"vit_hidden_size": 1280, "projector_hidden_size": 4096},
    **{"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5]},
    "vision_config": {"args": {"model": "vit_huge_patch16_224"}},
}
SAID_BY_MODELS: dict[str, dict[str, Any]] = {
    "BailingMoeLinearV2ForCausalLM": {
        **{"model_type": "bailing_moe_linear", "dtype": "bfloat16", "vocab_size": 157184},
        **{"hidden_size": 2048, "num_hidden_layers": 20, "layer_group_size": 5, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5120, "use_bias": False},
        **{"use_qkv_bias": False, "use_qk_norm": True, "group_norm_size": 4, "rope_theta": 1e6},
        **{"partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        **{"num_experts": 0},
    },
    "BailingMoeV2_5ForCausalLM": {
        **{"model_type": "bailing_hybrid", "dtype": "bfloat16", "vocab_size": 157184, "hidden_size": 4096},
        **{"num_hidden_layers": 32, "layer_group_size": 8, "num_attention_heads": 32, "head_dim": 128},
        **{"intermediate_size": 9216, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True},
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "group_norm_size": 8, "rope_theta": 6e6, "partial_rotary_factor": 0.5},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_experts": 0},
    },
    "BailingMoeV3ForCausalLM": LING,
    "BailingMoeV3VLForConditionalGeneration": {"text_config": LING},
    "DeltaNetForCausalLM": {"model_type": "delta_net", "dtype": "bfloat16"},
    "GLAForCausalLM": {"model_type": "gla", "dtype": "bfloat16"},
    "RetNetForCausalLM": {"model_type": "retnet", "dtype": "bfloat16"},
    "Glm5NextForCausalLM": GLM5_NEXT,
    "Glm5NextForConditionalGeneration": {"text_config": GLM5_NEXT},
    "InternS2MobiusForConditionalGeneration": {"text_config": {"num_blocks": 2}},
    "Lfm2ForCausalLM": LFM2,
    "Lfm2VlForConditionalGeneration": {"text_config": LFM2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": {"dtype": "bfloat16", "text_config": KIMI_LINEAR},
    "Qwen4ExpForCausalLM": {"dtype": "bfloat16", "text_config": QWEN4_EXP},
    "Qwen4ExpForConditionalGeneration": {"dtype": "bfloat16", "text_config": QWEN4_EXP},
    "NemotronHForCausalLM": NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": NEMOTRON_H,
    **dict.fromkeys(NEMOTRONS_THAT_SEE, NEMOTRON_VISION),
}
"""What vLLM needs, published models say, and transformers has no value or another for."""
LIKE = {
    "Glm5NextForCausalLM": "glm5_next_text",
    "InternS2MobiusForConditionalGeneration": "qwen3_5_moe",
    "InternS2PreviewForConditionalGeneration": "qwen3_5_moe",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    **dict.fromkeys(NEMOTRONS_THAT_SEE, "lfm2_vl"),
}
"""Model types whose configuration is taken where an architecture has none of its own."""


def configuration(architecture: str) -> dict[str, Any] | None:
    """A configuration of the architecture; ``None``: transformers and vLLM do not know it."""
    said, config = SAID_BY_MODELS.get(architecture, {}), _silent(architecture)
    if config is None and "model_type" not in said:
        return None
    return _completed(config or {}, said)


def _silent(architecture: str) -> dict[str, Any] | None:
    """What transformers or vLLM take where a model says nothing."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.configs import BailingMoeV3TextConfig

    if (model_type := LIKE.get(architecture)) is not None:
        return {**_plain(CONFIG_MAPPING[model_type]()), "model_type": model_type}
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for model_type, classes in names.items():
            if architecture in ([classes] if isinstance(classes, str) else classes):
                return {**_plain(CONFIG_MAPPING[model_type]()), "model_type": model_type}
    if architecture == "BailingMoeV3ForCausalLM":  # by another name
        return _plain(BailingMoeV3TextConfig())
    wanted = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()
    for model_type in _CONFIG_REGISTRY:
        if model_type.replace("_", "") == wanted:
            return {**_plain(_CONFIG_REGISTRY[model_type]()), "model_type": model_type}
    return None


def _completed(config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """``config`` with what is said, in its halves as well, but for one of another type."""
    halves = {k: v for k, v in said.items() if k.endswith("_config") and "model_type" not in v}
    return config | said | {key: config.get(key, {}) | half for key, half in halves.items()}


def _plain(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found
