"""The oracles of Ring and Ling 2.5 and of Ring-linear 2.0: lightning attention, and latent or grouped-query
attention with rotation.

Lightning attention is that of :mod:`.retention` with a constant decay a head, `g = log lambda_h`,

    lambda_h = e^{-s_h (1 - l / (L - 1) + 1e-5)}      s_h = 2^{-8 h / H},  h = 1 ... H

in layer l of L, for H a power of two. q and k are normalised by heads and rotated (half-split layout) in
their first channels, where YaRN is on by its tables; outputs are normalised in groups of channels and
multiplied by the sigmoid of a gate.

Grouped-query attention has q and k normalised and rotated alike. Experts are DeepSeek-V3's.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import LATENT_FAULTS, RELOCATION_FAULTS
from .mla import BAILING_NAMES, MLAOracle
from .oracle import FULL, LINEAR, Oracle, rms_norm, rotate
from .retention import Retention


class BailingOracle(Retention, MLAOracle):
    """Position-independent caching of such a checkpoint, by definition."""

    model_types = ("bailing_hybrid",)
    names: ClassVar[dict[str, str]] = BAILING_NAMES

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.rotated = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        self.linear_inv_freq = self._frequencies(self.rotated)

    def faults(self) -> list[str]:
        return [*super().faults(), *RELOCATION_FAULTS]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        group = config["layer_group_size"]
        linear = [bool((i + 1) % group) for i in range(config["num_hidden_layers"])]
        return config | {
            "layer_types": [LINEAR if it else FULL for it in linear],
            "rope_parameters": {
                "rope_theta": config["rope_theta"],
                **(config["rope_scaling"] or {"rope_type": "default"}),
            },
        }

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        turned, rest = rotate(x, positions, self.linear_inv_freq).split(
            [self.rotated, x.shape[-1] - self.rotated], -1
        )
        return torch.cat([self.table_length * turned, rest], -1)

    def _projected(self, index: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name, heads = f"layers.{index}.self_attn", self.config["num_attention_heads"]
        qkv = self._linear(x, f"{name}.query_key_value")
        qkv = F.silu(qkv) if self.config["linear_silu"] else qkv
        q, k, v = (part.view(len(x), heads, -1) for part in qkv.chunk(3, -1))
        slope = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        g = -slope * (1 - index / (self.config["num_hidden_layers"] - 1) + 1e-5)
        q, k = self._norm(q, f"{name}.query_layernorm"), self._norm(k, f"{name}.key_layernorm")
        return q, k, v, g[:, None].to(self.dtype)

    def _closed(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        name = f"layers.{index}.self_attn"
        y = y.reshape(len(x), self.config["group_norm_size"], -1)
        y = rms_norm(y, torch.ones(()).to(y), self.eps).flatten(1) * self._weights[f"{name}.g_norm.weight"]
        return self._linear(y * self._linear(x, f"{name}.g_proj").sigmoid(), f"{name}.o_proj")


class RingLinearOracle(BailingOracle):
    """Position-independent caching of a checkpoint of Ring-linear 2.0, by definition."""

    model_types = ("bailing_moe_linear",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        rows = [self.config["head_dim"] * number for number in (heads, kv_heads, kv_heads)]
        for name in (f"layers.{i}.self_attn" for i, kind in enumerate(self.layer_types) if kind == FULL):
            parts = self._weights.pop(f"{name}.query_key_value.weight").split(rows)
            for part, weight in zip("qkv", parts, strict=True):
                self._weights[f"{name}.{part}_proj.weight"] = weight
            for part, called in (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")):
                self._weights[f"{name}.{called}.weight"] = self._weights.pop(f"{name}.{part}.weight")

    def faults(self) -> list[str]:
        return [fault for fault in super().faults() if fault not in LATENT_FAULTS]

    def _inverse_frequencies(self) -> Tensor:
        return self._frequencies(int(self.config["head_dim"] * self.config["partial_rotary_factor"]))

    _attention = Oracle._attention
