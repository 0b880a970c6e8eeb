"""Random checkpoints, and others that draft well for them; or with a head that predicts further tokens (MTP).
Linear layers of the model, if it has some, say little, and what drafts has the weights of its layer of
attention."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.oracle import save_mamba2_model
from safetensors.torch import save_file

from benchmarks.lib.random_models import save_text_model

from . import tiny_models, tiny_vision
from .test_vision_text import DELTA_NET, EXPERTS, ROPE
from .tiny_models import PT, Weights, config_of, weights_of

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


def _read_alone(weights: Weights, last_norm: str) -> None:
    """Embeddings are of size 1 from now on, so that norms before attention change nothing; and answers depend
    on what is read."""
    words = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = words / words.pow(2).mean(1, keepdim=True).sqrt()
    for name in (f"model.{last_norm}.weight", "model.layers.0.input_layernorm.weight"):
        weights[name] = torch.ones_like(weights[name])
    weights["model.layers.0.self_attn.o_proj.weight"] *= 4
    weights["model.layers.0.self_attn.q_proj.weight"] *= 2


def _head_of(weights: Weights) -> Weights:
    """An EAGLE head that is the layer, and reads embeddings alone."""
    own = {n.removeprefix("model."): w for n, w in weights.items() if ".layers.0." in n}
    del own["layers.0.input_layernorm.weight"]
    own["fc.weight"] = torch.cat([torch.eye(128), torch.zeros(128, 128)], dim=1)
    return own


def save_near(model: Path, path: Path) -> Path:
    """The model with other weights, near enough to draft half of its answers."""
    shutil.copytree(model, path)
    rng = torch.Generator().manual_seed(0)
    with weights_of(path) as weights:
        for name, w in weights.items():
            weights[name] = (w.float() * (1 + 0.05 * torch.randn(w.shape, generator=rng))).to(w.dtype)
    return path


def save_with_head(path: Path, head: Path) -> None:
    """A Llama of one layer, and an EAGLE head that is this layer: its embeddings are of size 1, so that norms
    before attention change nothing, and the head reads them alone.  What tells both apart is that the head
    does not see the first token."""
    fields = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False}
    save_text_model(path, name="Llama", fields=fields, dtype=torch.float32)
    with weights_of(path) as weights:
        _read_alone(weights, "norm")
    shutil.copytree(path, head)
    save_file(_head_of(weights), head / "model.safetensors", metadata=PT)


def save_with_head3(path: Path, head: Path) -> None:
    """The same with an EAGLE-3 head.  Its rows have no embedding beside attention, so that those of the model
    weigh little here; of hidden states from before and behind the layer it reads a bit."""
    save_with_head(path, head)
    with weights_of(path) as weights:
        weights["model.layers.0.self_attn.o_proj.weight"] *= 16
    own = {f"midlayer.{n.split('.', 3)[3]}": w for n, w in weights.items() if ".layers.0." in n}
    for name in ("q_proj", "k_proj", "v_proj"):
        of_words = own[f"midlayer.self_attn.{name}.weight"]
        own[f"midlayer.self_attn.{name}.weight"] = torch.cat([of_words, torch.zeros_like(of_words)], dim=1)
    rng = torch.Generator().manual_seed(1)
    own |= {"midlayer.hidden_norm.weight": torch.ones(128), "norm.weight": weights["model.norm.weight"]}
    own["lm_head.weight"] = weights["lm_head.weight"]
    own["fc.weight"] = torch.randn(128, 256, generator=rng) / 100
    save_file(own, head / "model.safetensors", metadata=PT)
    with config_of(head) as config:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}


def save_falcon(path: Path, draft: Path, head: Path) -> None:
    """FalconH1 of one layer, Mamba2 beside attention, a Llama, and an EAGLE head that reads embeddings alone
    (like that of :func:`save_with_head`); in float32."""
    ones: dict[str, Any] = {
        f"{n}_multiplier": 1.0
        for n in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in")
    }
    several = {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2}
    save_mamba2_model(path, "FalconH1", num_hidden_layers=1, ssm_out_multiplier=0.1, **ones, **several)
    with weights_of(path) as weights:
        _read_alone(weights, "final_layernorm")
    names = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
    own: Weights = {
        ".".join(names.get(part, part) for part in name.split(".")): weight
        for name, weight in weights.items()
        if ".mamba." not in name
    }
    llama = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    _save(path, draft, own, "LlamaForCausalLM", **llama)
    _save(path, head, _head_of(own), "LlamaForCausalLM", **llama)


def save_another(draft: Path, path: Path) -> None:
    """One whose K and V are not the model's: both show where they are mistaken for each other."""
    shutil.copytree(draft, path)
    with weights_of(path) as weights:
        weights |= {n: w.flip(0) for n, w in weights.items() if "k_proj" in n or "v_proj" in n}


def save_qwen(path: Path, draft: Path, linear: int = 3) -> None:
    """Qwen3.5 of so many linear layers, whose attention has no gate, and a Qwen3 of two layers, the second of
    which says little; in bfloat16."""
    layers = ["linear_attention"] * linear + ["full_attention"]
    fields = DELTA_NET | {"num_hidden_layers": len(layers), "layer_types": layers}
    tiny_models.save(path, "Qwen3_5Text", fields, norm_center=0.0)
    attention, half = f"model.layers.{linear}.", tiny_models.SMALL["head_dim"]
    own: Weights = {}
    with weights_of(path, torch.bfloat16) as weights:
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
    config = json.loads((path / "config.json").read_text())
    rope = {n: x for n, x in config["rope_parameters"].items() if not n.startswith("mrope")}
    qwen = {"model_type": "qwen3", "num_hidden_layers": DRAFT_LAYERS, "attention_bias": False}
    given = {n: w.bfloat16() for n, w in of_draft.items()}
    _save(path, draft, given, "Qwen3ForCausalLM", **qwen, rope_parameters=rope, dtype="bfloat16")


WITH_EXPERTS = DELTA_NET | EXPERTS
SAVE = partial(tiny_models.save, norm_center=0.0)
SAVED: dict[str, Any] = {
    "qwen3.5": partial(SAVE, name="Qwen3_5Text", fields=DELTA_NET),
    "qwen3.5-vision": partial(tiny_vision.save_vision, name="Qwen3_5", text=DELTA_NET, norm_center=0.0),
    "qwen3.5-moe": partial(SAVE, name="Qwen3_5MoeText", fields=WITH_EXPERTS),
    "qwen3-next": partial(SAVE, name="Qwen3Next", fields=WITH_EXPERTS | {"rope_parameters": ROPE}),
}
"""A linear layer and one of attention."""


def save_with_predictor(path: Path, name: str) -> Path:
    """A model whose head is its layer of attention, and reads nearly the same: embeddings are of size 1, so
    that the norm before it changes nothing, and the linear layer adds to them a part of its output alone.
    What tells both apart is that part, a bit of the hidden state, and the first token, which the head does
    not see."""
    SAVED[name](path)
    with weights_of(path, torch.bfloat16) as weights:
        [words] = (n for n in weights if n.endswith("embed_tokens.weight"))
        root = words.removesuffix("embed_tokens.weight")
        weights[words] /= weights[words].pow(2).mean(1, keepdim=True).sqrt()
        weights[f"{root}norm.weight"].zero_()
        for key in weights:
            if key.startswith(f"{root}layers.0.mlp."):
                weights[key].zero_()
        weights[f"{root}layers.0.linear_attn.out_proj.weight"] *= 0.3
        weights[f"{root}layers.1.self_attn.o_proj.weight"] *= 2
        hidden, attention = weights[words].shape[1], f"{root}layers.1."
        head = {n.replace(attention, "layers.0."): w.clone() for n, w in weights.items() if attention in n}
        head["fc.weight"] = torch.cat([torch.eye(hidden), 0.1 * torch.eye(hidden)], dim=1)
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            head[f"{norm}.weight"] = torch.zeros(hidden)
        weights |= {f"mtp.{n}": w for n, w in head.items()}
    with config_of(path) as config:
        text = config.get("text_config", config)
        layers = "num_nextn_predict_layers" if text["model_type"] == "qwen3_next" else "mtp_num_hidden_layers"
        text[layers] = 1
    return path
