"""Random checkpoints of Kimi-Linear, weights under their published names, which vLLM's loader knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .random_models import SPECIAL_IDS, save_model

LATENT, ROTATED_PART = 512, 64
"""What vLLM's latent attention on CPU takes; Kimi-Linear rotates neither part."""
TAPS = 4


def save_kimi_model(
    path: str | Path,
    *,
    layer_types: list[str],
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    head_dim: int = 32,
    linear_heads: int = 2,
    linear_head_dim: int = 32,
    gate_bound: float | None = None,
    experts: int = 0,
    silent: bool = False,
    vocab: int = 512,
    max_positions: int = 32768,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random Kimi-Linear; layers are of type `linear_attention` and `full_attention`.

    `gate_bound`: log decays are this times a sigmoid; `experts`: in every layer but the first, two chosen of
    so many, in two of four groups, beside a shared one; `silent`: attention layers add nothing.
    """
    kinds = [
        [i for i, kind in enumerate(layer_types, 1) if (kind == "linear_attention") == linear]
        for linear in (True, False)
    ]
    linear: dict[str, Any] = {
        "num_heads": linear_heads,
        "head_dim": linear_head_dim,
        "short_conv_kernel_size": TAPS,
    }
    linear |= {"kda_layers": kinds[0], "full_attn_layers": kinds[1]}
    if gate_bound is not None:
        linear["gate_lower_bound"] = gate_bound
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": len(layer_types),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": ROTATED_PART,
        "v_head_dim": head_dim,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "first_k_dense_replace": 1 if experts else len(layer_types),
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        **SPECIAL_IDS,
    }
    if experts:
        config |= {"num_experts": experts, "num_experts_per_token": 2, "num_shared_experts": 1}
        config |= {"moe_intermediate_size": intermediate // 4, "routed_scaling_factor": 2.0}
        config |= {"num_expert_group": 4, "topk_group": 2}
    layers = [_layer(config, kind, index) for index, kind in enumerate(layer_types)]
    folder = save_model(Checkpoint(config, "embed_tokens", layers), Path(path), dtype, seed, norm_center=1.0)
    if silent:
        silence(folder / "model.safetensors", "self_attn.o_proj", [i - 1 for i in kinds[1]])
    return folder


Shapes = dict[str, tuple[int, ...]]


class Checkpoint(nn.Module):
    """Parameters under their names, for `save_model`: the model's own, and those of its `layers`."""

    def __init__(self, config: dict[str, Any], embeddings: str, layers: list[Shapes]) -> None:
        super().__init__()
        self.fields = config
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        shapes: Shapes = {f"model.{embeddings}": (vocab, hidden), "lm_head": (vocab, hidden)}
        shapes |= {"model.norm": (hidden,)}
        for index, layer in enumerate(layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        for name, shape in shapes.items():
            name = name if name.endswith((".A_log", ".dt_bias", "_bias")) else f"{name}.weight"
            self._add(name.split("."), shape)

    class _Config:
        def __init__(self, vocab_size: int) -> None:
            self.vocab_size = vocab_size

    @property
    def config(self) -> _Config:
        return self._Config(self.fields["vocab_size"])

    def _add(self, path: list[str], shape: tuple[int, ...]) -> None:
        owner: nn.Module = self
        for part in path[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(path[-1], nn.Parameter(torch.empty(shape)))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.fields, indent=2))
        weights = {name: weight.detach().contiguous() for name, weight in self.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _layer(config: dict[str, Any], kind: str, index: int) -> Shapes:
    """Shapes of a layer's weights."""
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    if kind == "linear_attention":
        heads, K = linear["num_heads"], linear["head_dim"]
        attention = delta_shapes(hidden, heads, K)
        for gate in "fg":
            attention |= {f"{gate}_a_proj": (K, hidden), f"{gate}_b_proj": (heads * K, K)}
    else:
        attention = latent_shapes(config) | {
            "o_proj": (hidden, config["num_attention_heads"] * config["v_head_dim"])
        }
    shapes = norm_shapes(hidden) | {f"self_attn.{name}": shape for name, shape in attention.items()}
    gated = ("gate_proj", "up_proj", "down_proj")
    if not (experts := config.get("num_experts", 0)) or index < config["first_k_dense_replace"]:
        return shapes | mlp_shapes("mlp", gated, hidden, config["intermediate_size"])
    inner = config["moe_intermediate_size"]
    shapes |= {"block_sparse_moe.gate": (experts, hidden)}
    shapes |= {"block_sparse_moe.gate.e_score_correction_bias": (experts,)}
    shapes |= mlp_shapes("block_sparse_moe.shared_experts", gated, hidden, inner)
    for expert in range(experts):
        shapes |= mlp_shapes(f"block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), hidden, inner)
    return shapes


def norm_shapes(hidden: int) -> Shapes:
    return {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}


def delta_shapes(hidden: int, heads: int, K: int) -> Shapes:
    """Of Kimi delta attention, without its gates."""
    channels = heads * K
    shapes: Shapes = {f"{part}_proj": (channels, hidden) for part in "qkv"}
    shapes |= {f"{part}_conv1d": (channels, 1, TAPS) for part in "qkv"}
    shapes |= {"b_proj": (heads, hidden), "o_proj": (hidden, channels), "o_norm": (K,)}
    return shapes | {"A_log": (1, 1, heads, 1), "dt_bias": (channels,)}


def latent_shapes(config: dict[str, Any]) -> Shapes:
    """Of latent attention, without its output."""
    hidden, heads, nope = config["hidden_size"], config["num_attention_heads"], config["qk_nope_head_dim"]
    queries, rank = heads * (nope + ROTATED_PART), config["q_lora_rank"]
    shapes: Shapes = {"q_proj": (queries, hidden)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    return shapes | {
        "kv_a_proj_with_mqa": (LATENT + ROTATED_PART, hidden),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (heads * (nope + config["v_head_dim"]), LATENT),
    }


def mlp_shapes(name: str, parts: tuple[str, str, str], hidden: int, inner: int) -> Shapes:
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    return {f"{name}.{part}": size for part, size in zip(parts, sizes, strict=True)}


def silence(file: Path, output: str, layers: list[int]) -> None:
    """These layers, counted from 0, add nothing."""
    from safetensors.torch import load_file

    weights = load_file(file)
    for layer in layers:
        weights[f"model.layers.{layer}.{output}.weight"].zero_()
    save_file(weights, file, metadata={"format": "pt"})
