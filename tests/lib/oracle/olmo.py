"""The oracle of OLMo-Hybrid: Qwen3.5's delta net with `beta = 2 sigmoid(b)`, other norms, rotation or none.

Linear layers are normalised before each branch, attention layers behind it; q and k are normalised over all
heads together.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.random_models import SPECIAL_IDS, save_model

from .faults import ROTATION_FAULTS
from .models import SIZES
from .oracle import FULL, LINEAR, LinearState, Oracle, rms_norm

FUSED = {"in_proj_qkv": ("q_proj", "k_proj", "v_proj"), "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")}
NAMES = {
    **{"a_proj": "in_proj_a", "f_proj": "in_proj_a", "b_proj": "in_proj_b", "g_proj": "in_proj_z"},
    **{"o_norm": "norm", "o_proj": "out_proj"},
}
"""Of a linear layer's weights, as Qwen3.5 calls them."""


def name_as_qwen(weights: dict[str, Tensor], ours: str, theirs: str) -> None:
    """Rename a linear layer's weights, and join those of q, k and v; no model has all of them."""
    for fused, parts in FUSED.items():
        found = [weights.pop(key) for part in parts if (key := f"{theirs}.{part}.weight") in weights]
        if found:
            weights[f"{ours}.{fused}.weight"] = torch.cat(found)
    for part, name in NAMES.items():
        if (key := f"{theirs}.{part}.weight") in weights:
            weights[f"{ours}.{name}.weight"] = weights.pop(key)


class OlmoOracle(Oracle):
    """Position-independent caching of an OLMo-Hybrid checkpoint, by definition."""

    model_types = ("olmo_hybrid",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.largest_beta = 2.0 if self.config["linear_allow_neg_eigval"] else 1.0
        self.eps = 1e-5  # of the linear layers' gated norm
        for index, kind in enumerate(self.layer_types):
            if kind == LINEAR:
                name = f"layers.{index}.linear_attn"
                name_as_qwen(self._weights, name, name)

    def faults(self) -> list[str]:
        """Without rotation, those of rotation do not show."""
        unseen = () if len(self.inv_freq) else ROTATION_FAULTS
        return [fault for fault in super().faults() if fault not in unseen]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        size = config["hidden_size"] // config["num_attention_heads"]
        return config | {"head_dim": size, "rotates": config["rope_parameters"]["rope_theta"] is not None}

    def _layer(self, index: int, x: Tensor, *given: Any) -> tuple[Tensor, tuple, LinearState | None]:
        if self.layer_types[index] == LINEAR:
            return super()._layer(index, x, *given)
        y, *kept = self._mixer(index, x, *given)
        x = x + self._norm(y, f"layers.{index}.post_attention_layernorm")
        return x + self._norm(self._mlp(index, x), f"layers.{index}.post_feedforward_layernorm"), *kept

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Of q and k `[n, H, D]` over all heads."""
        weight, eps = self._weights[f"{name}.weight"], self.config["rms_norm_eps"]
        return rms_norm(x.flatten(1), weight, eps).view_as(x)


def save_olmo_model(
    path: str | Path, *, layer_types: list[str], rope_theta: float | None = 10000.0, silent: bool = False
) -> Path:
    """A random OLMo-Hybrid in float32: in linear layers two key heads and four value heads of 48 x 96.

    `rope_theta=None`: without rotation; `silent`: attention layers, of which it must have one, add nothing.
    """
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    key_heads, heads, K, V = 2, 4, 48, 96
    config = OlmoHybridConfig(
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        hidden_size=256,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        **SIZES,
        **SPECIAL_IDS,
    )
    model = OlmoHybridForCausalLM(config)
    folder = save_model(model, Path(path), torch.float32, seed=0, norm_center=1.0)
    # Under the names that vLLM's loader knows; transformers would cut a convolution into three equal parts.
    weights = model.state_dict()
    for index in [i for i, kind in enumerate(layer_types) if silent and kind == FULL]:
        for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
            weights[f"model.layers.{index}.{norm}.weight"].zero_()
    for name in [name for name in weights if name.endswith(".conv1d.weight")]:
        parts = weights.pop(name).split([key_heads * K, key_heads * K, heads * V])
        for part, weight in zip("qkv", parts, strict=True):
            weights[name.replace(".conv1d", f".{part}_conv1d")] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
