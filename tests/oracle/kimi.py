"""The oracle of Kimi-Linear: Kimi delta attention, and latent attention without rotation.

Kimi Linear (arXiv:2510.26692), section 3. Per head, with a gate of every channel,

    S_i = (I - beta_i k_i k_i^T) Diag(e^{g_i}) S_{i-1} + beta_i k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

    g = -e^{A_log} softplus(W_b W_a x + dt_bias)     or, bounded,     g = bound sigmoid(e^{A_log} (...))

q, k and v each have a convolution; outputs are normalised and multiplied by the sigmoid of a gate of low
rank. Experts are chosen by their sigmoids plus a correction, weighted by the sigmoids alone, made to add up
to 1 and multiplied by a factor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS, STATE_FAULTS
from .mla import MLAOracle
from .olmo import FUSED, ROTATION_FAULTS


class KimiOracle(MLAOracle):
    """Position-independent caching of a Kimi-Linear checkpoint, by definition."""

    model_types = ("kimi_linear",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.gate_bound: float | None = self.config["linear_attn_config"].get("gate_lower_bound")
        for index, kind in enumerate(self.layer_types):
            if kind == "linear_attention":
                self._name_as_qwen(f"layers.{index}.self_attn", f"layers.{index}.linear_attn")

    def _name_as_qwen(self, theirs: str, ours: str) -> None:
        """A linear layer's weights under the names of Qwen3.5's, projections of low rank multiplied out."""
        w = self._weights
        for fused, parts in FUSED.items():
            w[f"{ours}.{fused}.weight"] = torch.cat([w.pop(f"{theirs}.{part}.weight") for part in parts])
        for gate, name in (("f", "in_proj_a"), ("g", "in_proj_z")):
            down, up = (w.pop(f"{theirs}.{gate}_{part}_proj.weight") for part in "ab")
            w[f"{ours}.{name}.weight"] = up @ down
        for part, name in (("b_proj", "in_proj_b"), ("o_norm", "norm"), ("o_proj", "out_proj")):
            w[f"{ours}.{name}.weight"] = w.pop(f"{theirs}.{part}.weight")
        for part in ("A_log", "dt_bias"):
            w[f"{ours}.{part}"] = w.pop(f"{theirs}.{part}").flatten()

    def faults(self) -> list[str]:
        """Without rotation, those of rotation do not show."""
        return [f for f in (*SEAM_FAULTS, *STATE_FAULTS, *ATTENTION_FAULTS) if f not in ROTATION_FAULTS]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        linear = config["linear_attn_config"]
        kinds = {i: "linear_attention" for i in linear["kda_layers"]}
        kinds |= {i: "full_attention" for i in linear["full_attn_layers"]}
        return config | {
            "layer_types": [kinds[i + 1] for i in range(config["num_hidden_layers"])],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "linear_num_key_heads": linear["num_heads"],
            "linear_num_value_heads": linear["num_heads"],
            "linear_key_head_dim": linear["head_dim"],
            "linear_value_head_dim": linear["head_dim"],
            "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        }

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def _log_decays(self, name: str, a: Tensor) -> Tensor:
        """`g [n, H, K]` of gates `a [n, H K]`."""
        rate = self._weights[f"{name}.A_log"].exp()[:, None]
        x = (a + self._weights[f"{name}.dt_bias"]).view(len(a), len(rate), -1)
        return -rate * F.softplus(x) if self.gate_bound is None else self.gate_bound * (rate * x).sigmoid()

    def _opening(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        name = f"layers.{index}.block_sparse_moe"
        if f"{name}.gate.weight" not in self._weights:
            return super()._mlp(index, x)
        scores = self._linear(x, f"{name}.gate").sigmoid()
        chosen = scores + self._weights[f"{name}.gate.e_score_correction_bias"]
        chosen = chosen.topk(self.config["num_experts_per_token"], -1).indices
        best = scores.gather(-1, chosen)
        best = best / best.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        weights = torch.zeros_like(scores).scatter(-1, chosen, best)
        experts = [self._expert(x, f"{name}.experts.{e}") for e in range(scores.shape[-1])]
        routed = torch.einsum("ne,end->nd", weights, torch.stack(experts))
        return self._gated(x, f"{name}.shared_experts") + routed

    def _expert(self, x: Tensor, name: str) -> Tensor:
        inner = F.silu(self._linear(x, f"{name}.w1")) * self._linear(x, f"{name}.w3")
        return self._linear(inner, f"{name}.w2")
