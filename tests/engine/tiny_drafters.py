"""Random checkpoints with linear layers, and models of full attention that draft well for them: linear layers
say little, and what drafts has the weights of the layer of attention."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from oracle import save_mamba2_model
from safetensors.torch import load_file, save_file

from . import tiny_models
from .test_vision_text import DELTA_NET

Weights = dict[str, torch.Tensor]
DRAFT_LAYERS = 2
"""Beside three linear layers and one of attention vLLM keeps them in one group with that."""
SHARED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHARED += ("vocab_size", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "hidden_act")
SHARED += ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "rope_parameters")


def _save(model: Path, path: Path, weights: Weights, architecture: str, **fields: Any) -> None:
    """A checkpoint beside ``model``, of its sizes."""
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    given = json.loads((model / "config.json").read_text())
    config = {name: given[name] for name in SHARED if name in given} | fields
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", metadata=PT)


PT = {"format": "pt"}


def save_falcon(path: Path, draft: Path, head: Path) -> None:
    """FalconH1 of one layer, Mamba2 beside attention, a Llama, and an EAGLE head that reads embeddings alone
    (``test_drafts.save_with_head``); in float32."""
    ones: dict[str, Any] = {
        f"{n}_multiplier": 1.0
        for n in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in")
    }
    several = {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2}
    save_mamba2_model(path, "FalconH1", num_hidden_layers=1, ssm_out_multiplier=0.1, **ones, **several)
    file = path / "model.safetensors"
    weights = load_file(file)
    words = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = words / words.pow(2).mean(1, keepdim=True).sqrt()
    for name in ("final_layernorm", "layers.0.input_layernorm"):
        weights[f"model.{name}.weight"] = torch.ones_like(weights[f"model.{name}.weight"])
    weights["model.layers.0.self_attn.o_proj.weight"] *= 4
    weights["model.layers.0.self_attn.q_proj.weight"] *= 2
    save_file(weights, file, metadata=PT)
    names = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
    own: Weights = {}
    for name, weight in weights.items():
        if ".mamba." not in name:
            parts = [names.get(part, part) for part in name.split(".")]
            own[".".join(parts)] = weight
    llama = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    _save(path, draft, own, "LlamaForCausalLM", **llama)
    layer = {n.removeprefix("model."): w for n, w in own.items() if ".layers.0." in n}
    del layer["layers.0.input_layernorm.weight"]
    layer["fc.weight"] = torch.cat([torch.eye(128), torch.zeros(128, 128)], dim=1)
    _save(path, head, layer, "LlamaForCausalLM", **llama)


def save_another(draft: Path, path: Path) -> None:
    """One whose K and V are not the model's: both show where they are mistaken for each other."""
    shutil.copytree(draft, path)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, file, metadata=PT)


def save_qwen(path: Path, draft: Path, linear: int = 3) -> None:
    """Qwen3.5 of so many linear layers, whose attention has no gate, and a Qwen3 of two layers, the second of
    which says little; in bfloat16."""
    layers = ["linear_attention"] * linear + ["full_attention"]
    fields = DELTA_NET | {"num_hidden_layers": len(layers), "layer_types": layers}
    tiny_models.save(path, "Qwen3_5Text", fields, norm_center=0.0)
    file = path / "model.safetensors"
    weights = {n: w.float() for n, w in load_file(file).items()}
    attention, half = f"model.layers.{linear}.", tiny_models.SMALL["head_dim"]
    own: Weights = {}
    for name, weight in weights.items():
        if name.startswith("model.layers.") and not name.startswith(attention):
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                weight *= 0.1
        elif name.endswith("q_proj.weight"):
            by_head = weight.view(-1, 2 * half, weight.shape[1])
            by_head[:, half:] = 0  # half of what is read goes through
            own[name] = by_head[:, :half].flatten(0, 1)
        else:
            own[name] = weight / 2 if name.endswith("o_proj.weight") else weight
            own[name] = weight + 1 if "norm" in name else own[name]
    of_draft: Weights = {n: w for n, w in own.items() if not n.startswith(attention)}
    for i in range(DRAFT_LAYERS):
        for name, weight in own.items():
            if name.startswith(attention):
                low = 0.05 if i and name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                of_draft[name.replace(attention, f"model.layers.{i}.")] = low * weight
    save_file({n: w.bfloat16() for n, w in weights.items()}, file, metadata=PT)
    config = json.loads((path / "config.json").read_text())
    rope = {n: x for n, x in config["rope_parameters"].items() if not n.startswith("mrope")}
    qwen = {"model_type": "qwen3", "num_hidden_layers": DRAFT_LAYERS, "attention_bias": False}
    given = {n: w.bfloat16() for n, w in of_draft.items()}
    _save(path, draft, given, "Qwen3ForCausalLM", **qwen, rope_parameters=rope, dtype="bfloat16")
