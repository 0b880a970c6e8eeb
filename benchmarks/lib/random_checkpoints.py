"""Parts of random checkpoints for models that only vLLM implements, with weights under published names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .random_models import save_model

Shape = tuple[int, ...]
LATENT, ROTATED_PART = 512, 64
"""Widths of the latent and of its rotated part that vLLM's latent attention on CPU takes."""
UNNAMED = (".A_log", ".dt_bias", "_bias", ".bias")
"""Ends of names of parameters; all other names are modules with a `weight`."""


def save_checkpoint(
    path: str | Path, config: dict[str, Any], shapes: Mapping[str, Shape], dtype: torch.dtype, seed: int
) -> Path:
    """Save random weights of these shapes with `config` and a tokenizer; names are of weights or modules."""
    return save_model(_Checkpoint(config, shapes), Path(path), dtype, seed, norm_center=1.0)


def model_shapes(
    config: Mapping[str, Any], embeddings: str, layers: Iterable[dict[str, Shape]]
) -> dict[str, Shape]:
    """Return the shapes of a whole model's weights from the shapes of its layers' weights."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {f"model.{embeddings}": (vocab, hidden), "lm_head": (vocab, hidden)}
    shapes |= {"model.norm": (hidden,)}
    for index, layer in enumerate(layers):
        norms: dict[str, Shape] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in (norms | layer).items()}
    return shapes


def silence(folder: Path, owners: Iterable[str]) -> None:
    """Set the weights of the modules `owners` to zero, so that they add nothing."""
    scale(folder, owners, 0.0)


def scale(folder: Path, owners: Iterable[str], by: float) -> None:
    """Multiply the weights of the modules `owners` by `by`."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for owner in owners:
        weights[f"{owner}.weight"].mul_(by)
    save_file(weights, file, metadata={"format": "pt"})


def bailing_fields(layers: int, group: int, head_dim: int) -> dict[str, Any]:
    """Return the fields common to Bailing's hybrids, in which each `group`-th layer has full attention."""
    return {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": layers,
        "layer_group_size": group,
        "hidden_act": "silu",
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def latent_fields(head_dim: int, query_rank: int | None) -> dict[str, Any]:
    """Return the configuration fields of latent attention, under DeepSeek's names."""
    return {
        "kv_lora_rank": LATENT,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": ROTATED_PART,
        "v_head_dim": head_dim,
    }


def bailing_layer(config: Mapping[str, Any], index: int, attention: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a layer in Bailing's hybrids: any kind of attention, and an MLP or experts."""
    shapes = {f"attention.{name}": shape for name, shape in attention.items()}
    hidden, experts = config["hidden_size"], config["num_experts"]
    if not experts or index < config["first_k_dense_replace"]:
        return shapes | mlp("mlp", hidden, config["intermediate_size"])
    shapes |= {"mlp.gate": (experts, hidden), "mlp.gate.expert_bias": (experts,)}
    for part in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
        shapes |= mlp(f"mlp.{part}", hidden, config["moe_intermediate_size"])
    return shapes


def latent_attention(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of latent attention's weights without output projection, under DeepSeek's names."""
    heads, hidden, rank = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    query = heads * (nope + ROTATED_PART)
    shapes: dict[str, Shape] = {"q_proj": (query, hidden)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (query, rank)}
    return shapes | {
        "kv_a_proj_with_mqa": (LATENT + ROTATED_PART, hidden),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (heads * (nope + v), LATENT),
    }


def mlp(
    name: str, hidden: int, inner: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Shape]:
    """Return the shapes of a gated MLP."""
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    return {f"{name}.{part}": size for part, size in zip(parts, sizes, strict=True)}


class _Checkpoint(nn.Module):
    """A module that holds parameters under their names, for `save_model`."""

    def __init__(self, config: dict[str, Any], shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.fields = config
        for name, shape in shapes.items():
            name = name if name.endswith(UNNAMED) else f"{name}.weight"
            self._add(name.split("."), shape)

    class _Config:
        def __init__(self, vocab_size: int) -> None:
            self.vocab_size = vocab_size

    @property
    def config(self) -> _Config:
        return self._Config(self.fields["vocab_size"])

    def _add(self, path: list[str], shape: Shape) -> None:
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
