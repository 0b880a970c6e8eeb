"""Random checkpoints of flash-linear-attention's models: a linear mixer, and full attention in every
`group`-th layer, or in none."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_checkpoints import Shape, mlp, save_checkpoint, scale, silence
from benchmarks.lib.random_models import SPECIAL_IDS

DELTA_NET, RETNET, GLA = "delta_net", "retnet", "gla"
ARCHITECTURES = {DELTA_NET: "DeltaNetForCausalLM", RETNET: "RetNetForCausalLM", GLA: "GLAForCausalLM"}
"""vLLM's name of the class of each model type."""
VOCAB = 512


def save_fla_model(
    path: str | Path,
    *,
    kind: str = DELTA_NET,
    layers: int = 4,
    group: int | None = 2,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    expand_k: float = 1.0,
    expand_v: float = 1.0,
    silent: bool = False,
    tie: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **fields: Any,
) -> Path:
    """Save a random model of type `kind`.

    `group=None`: without full attention; `silent`: it adds nothing; `fields`: others of the configuration.
    """
    attends = [] if group is None else list(range(group - 1, layers, group))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "expand_k": expand_k,
        "expand_v": expand_v,
        "hidden_act": "swish",
        "norm_eps": 1e-5,
        "attn": None,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tie,
        **fields,
        **SPECIAL_IDS,
    }
    if attends:
        config["attn"] = {"layers": attends, "num_heads": 4, "num_kv_heads": 2}
        config["attn"] |= {"qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
    shapes: dict[str, Shape] = {"model.embeddings": (VOCAB, hidden), "model.norm": (hidden,)}
    if not tie:
        shapes |= {"lm_head": (VOCAB, hidden)}
    for index in range(layers):
        mixer = _attention(config) if index in attends else _MIXERS[kind](config)
        layer: dict[str, Shape] = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
        layer |= {f"attn.{name}": shape for name, shape in mixer.items()} | mlp("mlp", hidden, intermediate)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    folder = save_checkpoint(path, config, shapes, dtype, seed=0)
    scale(folder, ["model.embeddings"], 2.5)  # as other models' are, whose embeddings have other names
    if silent:
        silence(folder, [f"model.layers.{index}.attn.o_proj" for index in attends])
    return folder


def _attention(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, attn = config["hidden_size"], config["attn"]
    kv = hidden // attn["num_heads"] * attn["num_kv_heads"]
    return _projections(hidden, hidden, kv, kv, hidden)


def _delta_net(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, heads, key, value = _sizes(config)
    shapes = _projections(hidden, key, key, value, value)
    shapes |= {"b_proj": (heads, hidden), "o_norm": (value // heads,)}
    if config.get("use_short_conv", True):
        taps = config.get("conv_size", 4)
        widths = {"q": key, "k": key, "v": value}
        shapes |= {f"{name}_conv1d": (width, 1, taps) for name, width in widths.items()}
    if config.get("use_gate", False):
        shapes |= {"g_proj": (value, hidden)}
    return shapes


def _retention(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, heads, key, value = _sizes(config)
    shapes = _projections(hidden, key, key, value, value)
    if not config.get("use_output_gate", True):
        return shapes | {"g_norm": (value // heads,)}
    norm = "g_norm_swish_gate" if config.get("fuse_norm", True) else "g_norm"
    return shapes | {"g_proj": (value, hidden), norm: (value // heads,)}


def _gated_linear(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, _, key, _ = _sizes(config)
    gates: dict[str, Shape] = {"gk_proj.0": (16, hidden), "gk_proj.1": (key, 16), "gk_proj.1.bias": (key,)}
    return _retention(config) | gates


def _projections(hidden: int, q: int, k: int, v: int, out: int) -> dict[str, Shape]:
    return {"q_proj": (q, hidden), "k_proj": (k, hidden), "v_proj": (v, hidden), "o_proj": (hidden, out)}


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Width of the hidden state, number of heads, widths of all heads' keys and of their values."""
    hidden = config["hidden_size"]
    return hidden, config["num_heads"], int(hidden * config["expand_k"]), int(hidden * config["expand_v"])


_MIXERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Shape]]] = {
    **{DELTA_NET: _delta_net, RETNET: _retention, GLA: _gated_linear},
}
