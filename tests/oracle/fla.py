"""The oracles of flash-linear-attention's models, by the papers' recurrences.

DeltaNet (arXiv:2406.06484) is the gated delta rule without gates,

    S_i = (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

with q, k and v behind convolutions, or none, and SiLU, q and k of length 1, and outputs normalised by heads,
perhaps multiplied by SiLU of a gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta import DeltaInputs
from .faults import ATTENTION_FAULTS, SEAM_FAULTS, STATE_FAULTS
from .olmo import FUSED
from .oracle import Oracle

LINEAR, FULL = "linear_attention", "full_attention"
NAMES = {"embeddings": "embed_tokens", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


class FlaOracle(Oracle):
    """What they have in common: a mixer and an MLP, each behind its norm."""

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.norms_heads = False
        for name in list(self._weights):
            parts = [NAMES.get(part, part) for part in name.split(".")]
            if parts[0] == "layers" and parts[2] == "attn":
                kind = self.layer_types[int(parts[1])]
                parts[2] = "linear_attn" if kind == LINEAR else "self_attn"
            self._weights[".".join(parts)] = self._weights.pop(name)

    def faults(self) -> list[str]:
        attends = FULL in self.layer_types
        return [*SEAM_FAULTS, *STATE_FAULTS, *(ATTENTION_FAULTS if attends else ())]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        attn = config["attn"] or {"layers": [], "num_heads": 1, "rope_theta": 10000.0}
        kinds = [FULL if i in attn["layers"] else LINEAR for i in range(config["num_hidden_layers"])]
        heads, hidden = config["num_heads"], config["hidden_size"]
        return config | {
            **{"layer_types": kinds, "hidden_act": "silu", "rms_norm_eps": config["norm_eps"]},
            **{"num_attention_heads": attn["num_heads"], "head_dim": hidden // attn["num_heads"]},
            "rope_parameters": {"rope_theta": attn["rope_theta"]},
            **{"linear_num_key_heads": heads, "linear_num_value_heads": heads},
            "linear_key_head_dim": int(hidden * config["expand_k"]) // heads,
            "linear_value_head_dim": int(hidden * config["expand_v"]) // heads,
        }


class DeltaNetOracle(FlaOracle):
    """Position-independent caching of a DeltaNet checkpoint, by definition.

    `largest_beta`: 2 where the configuration allows negative eigenvalues.
    """

    model_types = ("delta_net",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.largest_beta = 2.0 if self.config.get("allow_neg_eigval") else 1.0
        w = self._weights
        for name in (f"layers.{i}.linear_attn" for i, kind in enumerate(self.layer_types) if kind == LINEAR):
            for fused, parts in FUSED.items():
                found = [w.pop(f"{name}.{part}.weight") for part in parts if f"{name}.{part}.weight" in w]
                if found:
                    w[f"{name}.{fused}.weight"] = torch.cat(found)
            channels = len(w[f"{name}.in_proj_qkv.weight"])
            w.setdefault(f"{name}.conv1d.weight", torch.ones(channels, 1, 1, dtype=dtype))
            for theirs, ours in (("b_proj", "in_proj_b"), ("o_norm", "norm"), ("o_proj", "out_proj")):
                w[f"{name}.{ours}.weight"] = w.pop(f"{name}.{theirs}.weight")
            # What is not there is projected, and not looked at.
            values = w[f"{name}.out_proj.weight"].T
            w[f"{name}.in_proj_z.weight"] = w.pop(f"{name}.g_proj.weight", torch.zeros_like(values))
            w[f"{name}.in_proj_a.weight"] = torch.zeros_like(w[f"{name}.in_proj_b.weight"])

    def faults(self) -> list[str]:
        unseen = () if self.config["linear_conv_kernel_dim"] > 1 else ("no_conv_tail",)
        return [fault for fault in super().faults() if fault not in unseen]

    @classmethod
    def _understood(cls, config: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        taps = config.get("conv_size", 4) if config.get("use_short_conv", True) else 1
        return FlaOracle._understood(config) | {"linear_conv_kernel_dim": taps}

    def _log_decays(self, name: str, a: Tensor) -> Tensor:
        return torch.zeros_like(a)

    def _opening(self, z: Tensor) -> Tensor:
        return F.silu(z) if self.config.get("use_gate") else torch.ones_like(z)

    def _delta_inputs(self, qkv: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
        return super()._delta_inputs(qkv, g, self.largest_beta * beta)


ORACLES: dict[str, type[FlaOracle]] = {"delta_net": DeltaNetOracle}
"""By model type."""
MODELS: dict[str, dict[str, Any]] = {
    "delta-net": {"kind": "delta_net", "expand_v": 2.0},
    "delta-net-gated": {"kind": "delta_net", "use_gate": True, "allow_neg_eigval": True, "tie": True},
    "delta-net-without-convolutions": {"kind": "delta_net", "use_short_conv": False},
    "delta-net-alone": {"kind": "delta_net", "group": None},
}
"""Of `save_fla_model`, by name."""


def fla_oracle(model: str | Path, name: str) -> FlaOracle:
    return ORACLES[MODELS[name]["kind"]](model)
