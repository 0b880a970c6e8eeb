"""Tiny random checkpoints of the models that have Mamba1 layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from vllm_hypic.harness.random_models import SPECIAL_IDS, save_model

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    **SPECIAL_IDS,
}
JAMBA: dict[str, Any] = {
    # Attention in the second of every two layers, without rotation.
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
"""Jamba's mixture, in the second of every two layers."""
WITHOUT_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "state_size": 16,
    "time_step_rank": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Jamba": JAMBA,
    "Mamba": WITHOUT_ATTENTION,
    "FalconMamba": WITHOUT_ATTENTION,
}


def save_mamba1_model(
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

    config = getattr(transformers, f"{name}Config")(**COMMON | ARCHITECTURES[name] | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, Path(path), torch.float32, seed, norm_center=1.0)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("dt_proj.bias"):  # softplus^-1 of a step that is log-uniform in [1e-3, 1e-1]
                step = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1), generator=rng).exp()
                weight.copy_(step + torch.log(-torch.expm1(-step)))
            if key.endswith("A_log"):  # rates of which some forget in a token and some in a thousand
                weight.uniform_(math.log(0.2), math.log(16), generator=rng)
            if any(part in key for part in silent):
                weight.zero_()
    model.to(dtype).save_pretrained(path)
    return Path(path)
