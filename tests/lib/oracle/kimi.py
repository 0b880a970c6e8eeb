"""The oracles of Kimi-Linear and Bailing V3 (Ling 3): Kimi delta attention, and latent attention.

Kimi Linear (arXiv:2510.26692), section 3. Per head, with a gate of every channel,

    S_i = (I - beta_i k_i k_i^T) Diag(e^{g_i}) S_{i-1} + beta_i k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

    g = -e^{A_log} softplus(W x + dt_bias)     or, bounded,     g = bound sigmoid(e^{A_log} (W x + dt_bias))

q, k and v each have a convolution; outputs are normalised and multiplied by the sigmoid of a gate. The
projections to both gates are of low rank in Kimi-Linear. Experts are DeepSeek-V3's.

Kimi-Linear's latent attention rotates nothing. Bailing V3's does, and multiplies its outputs by the sigmoid
of a gate of every head or every channel, or of none.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import LATENT_FAULTS, ROTATION_FAULTS
from .mla import BAILING_NAMES, MLAOracle
from .olmo import name_as_qwen
from .oracle import FULL, LINEAR


class KimiDeltaOracle(MLAOracle):
    """What the two models have in common."""

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.gate_bound: float | None = self.config["gate_bound"]
        self._multiply()
        for layer in (f"layers.{i}" for i, kind in enumerate(self.layer_types) if kind == LINEAR):
            name_as_qwen(self._weights, f"{layer}.linear_attn", f"{layer}.self_attn")
            for part in ("A_log", "dt_bias"):
                flat = self._weights.pop(f"{layer}.self_attn.{part}").flatten()
                self._weights[f"{layer}.linear_attn.{part}"] = flat

    def _multiply(self) -> None:
        """Projections of low rank."""

    def _log_decays(self, name: str, a: Tensor) -> Tensor:
        """`g [n, H, K]` of gates `a [n, H K]`."""
        rate = self._weights[f"{name}.A_log"].exp()[:, None]
        x = (a + self._weights[f"{name}.dt_bias"]).view(len(a), len(rate), -1)
        return -rate * F.softplus(x) if self.gate_bound is None else self.gate_bound * (rate * x).sigmoid()

    def _opening(self, z: Tensor) -> Tensor:
        return z.sigmoid()


class KimiOracle(KimiDeltaOracle):
    """Position-independent caching of a Kimi-Linear checkpoint, by definition."""

    model_types = ("kimi_linear",)
    names: ClassVar[dict[str, str]] = {
        **{"block_sparse_moe": "mlp", "e_score_correction_bias": "expert_bias"},
        **{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    }

    def _multiply(self) -> None:
        w = self._weights
        for name in [name for name in w if name.endswith((".f_a_proj.weight", ".g_a_proj.weight"))]:
            w[name.replace("_a_", "_")] = w.pop(name.replace("_a_", "_b_")) @ w.pop(name)

    def faults(self) -> list[str]:
        """Without rotation, those of rotation do not show."""
        return [f for f in super().faults() if f not in (*ROTATION_FAULTS, *LATENT_FAULTS)]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        linear = config["linear_attn_config"]
        kinds = [
            LINEAR if i in linear["kda_layers"] else FULL for i in range(1, config["num_hidden_layers"] + 1)
        ]
        found = _delta_fields(linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"])
        found |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": kinds}
        found |= {"num_experts_per_tok": config.get("num_experts_per_token")}
        found |= {"n_group": config.get("num_expert_group"), "gate_bound": linear.get("gate_lower_bound")}
        return config | found

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class BailingOracle(KimiDeltaOracle):
    """Position-independent caching of a Bailing V3 checkpoint, by definition."""

    model_types = ("bailing_hybrid",)
    names: ClassVar[dict[str, str]] = BAILING_NAMES

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        layers, size = config["num_hidden_layers"], config["layer_group_size"]
        found = _delta_fields(
            config["num_attention_heads"], config["head_dim"], config["short_conv_kernel_size"]
        )
        found |= {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
        # What is left behind the last whole group attends.
        whole = layers // size * size
        kinds = [LINEAR if (i + 1) % size and i < whole else FULL for i in range(layers)]
        found |= {"gate_bound": config["kda_lower_bound"] if config["kda_safe_gate"] else None}
        return config | found | {"layer_types": kinds}

    def _opened(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        if (kind := self.config["gated_attention_proj_granularity_type"]) is None:
            return y
        gate = self._linear(x, f"{name}.g_proj").sigmoid()
        return y * (gate[..., None] if kind == "head_wise" else gate.view_as(y))


def _delta_fields(heads: int, size: int, taps: int) -> dict[str, Any]:
    return {
        **{"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": taps},
        **{"linear_key_head_dim": size, "linear_value_head_dim": size},
    }
