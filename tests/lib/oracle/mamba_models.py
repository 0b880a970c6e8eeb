"""Tiny random checkpoints of the models that have Mamba1 and Mamba2 layers, every multiplier in use."""

import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_models import SPECIAL_IDS, save_model

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    **SPECIAL_IDS,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
JAMBA: dict[str, Any] = {
    # Attention in the second of every two layers, without rotation.
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    **HEADS,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
"""Jamba's mixture, in the second of every two layers."""
MAMBA_ALONE: dict[str, Any] = {"num_hidden_layers": 3, "state_size": 16, "time_step_rank": 8}
MAMBA1: dict[str, dict[str, Any]] = {"Jamba": JAMBA, "Mamba": MAMBA_ALONE, "FalconMamba": MAMBA_ALONE}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LINEAR, FULL = "linear_attention", "full_attention"
MAMBA2: dict[str, dict[str, Any]] = {
    # Two groups of B and C; no rotation; MLPs are layers of their own.
    "NemotronH": {
        "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, LINEAR, FULL],
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 2,
    },
    "GraniteMoeHybrid": {
        **ROPE,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "position_embedding_type": "rope",
        "mamba_n_heads": 16,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 0.8,
    },
    # Attention and Mamba2 side by side in every layer.
    "FalconH1": {
        **ROPE,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.9,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [1.1, 0.8],
    },
    # Two attention blocks take turns, each place with adapters of its own.
    "Zamba2": {
        **ROPE,
        "num_hidden_layers": 6,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid", LINEAR, "hybrid"],
        "num_key_value_heads": 4,
        "mamba_d_state": 32,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "tie_word_embeddings": True,  # vLLM ties them whatever stands here
    },
}
MAMBA2_ALONE = {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 2}
"""Of pure Mamba2."""


def save_mamba_model(
    path: str | Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    silent: tuple[str, ...] = (),
    **fields: Any,
) -> Path:
    """A random model of transformers' ``<name>Config``; ``silent``: parts of names of weights that are 0."""
    import transformers

    given = COMMON | (MAMBA1[name] if name in MAMBA1 else HEADS | MAMBA2.get(name, MAMBA2_ALONE)) | fields
    config = getattr(transformers, f"{name}Config")(**given)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, Path(path), torch.float32, seed, norm_center=1.0)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("dt_proj.bias"):  # softplus^-1 of a step that is log-uniform in [1e-3, 1e-1]
                step = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1), generator=rng).exp()
                weight.copy_(step + torch.log(-torch.expm1(-step)))
            if key.endswith("A_log") and name in MAMBA1:
                # Rates of which some forget in a token and some in a thousand.
                weight.uniform_(math.log(0.2), math.log(16), generator=rng)
            if any(part in key for part in silent):
                weight.zero_()
    model.to(dtype).save_pretrained(path)
    return Path(path)
