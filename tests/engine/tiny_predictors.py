"""Random checkpoints with a head that predicts further tokens (MTP), small enough to start in seconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import tiny_models, tiny_vision
from .test_vision_text import DELTA_NET, EXPERTS

TEXT = DELTA_NET | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
}
SAVED: dict[str, Any] = {
    "qwen3.5": partial(tiny_models.save, name="Qwen3_5Text", fields=DELTA_NET, norm_center=0.0),
    "qwen3.5-vision": partial(tiny_vision.save_vision, name="Qwen3_5", text=DELTA_NET, norm_center=0.0),
    "qwen3.5-moe": partial(
        tiny_models.save, name="Qwen3_5MoeText", fields=DELTA_NET | EXPERTS, norm_center=0.0
    ),
    "qwen3-next": partial(tiny_models.save, name="Qwen3Next", fields=TEXT | EXPERTS, norm_center=0.0),
}
"""A linear layer and one of attention."""


def save_with_predictor(path: Path, name: str) -> Path:
    """A model whose head is its layer of attention, and reads nearly the same: embeddings are of size 1, so
    that the norm before it changes nothing, and the linear layer adds to them a part of its output alone.
    What tells both apart is that part, a bit of the hidden state, and the first token, which the head does
    not see."""
    SAVED[name](path)
    file = path / "model.safetensors"
    weights = {n: w.float() for n, w in load_file(file).items()}
    [words] = (n for n in weights if n.endswith("embed_tokens.weight"))
    root = words.removesuffix("embed_tokens.weight")
    size = weights[words].pow(2).mean(1, keepdim=True).sqrt()
    weights[words] /= size
    weights[f"{root}norm.weight"].zero_()
    for name in weights:
        if name.startswith(f"{root}layers.0.mlp."):
            weights[name].zero_()
    weights[f"{root}layers.0.linear_attn.out_proj.weight"] *= 0.3
    weights[f"{root}layers.1.self_attn.o_proj.weight"] *= 2
    hidden = weights[words].shape[1]
    attention = f"{root}layers.1."
    head = {n.replace(attention, "layers.0."): w.clone() for n, w in weights.items() if attention in n}
    head["fc.weight"] = torch.cat([torch.eye(hidden), 0.1 * torch.eye(hidden)], dim=1)
    head |= {
        f"{n}.weight": torch.zeros(hidden) for n in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    weights |= {f"mtp.{n}": w for n, w in head.items()}
    save_file({n: w.bfloat16() for n, w in weights.items()}, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_nextn_predict_layers" if text["model_type"] == "qwen3_next" else "mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    return path
