"""The oracles of flash-linear-attention's models, by the papers' recurrences.

DeltaNet (arXiv:2406.06484) is the gated delta rule without gates,

    S_i = (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

with q, k and v behind convolutions, or none, and SiLU, q and k of length 1, and outputs normalised by heads,
perhaps multiplied by SiLU of a gate.

Retention and gated linear attention are those of :mod:`.retention`, the one with `g = log(1 - 2^{-5-h})` in
head h, counted from 0, and q and k rotated (half-split layout), the other in every channel with
`g = logsigmoid(W_2 W_1 x + b) / 16`, perhaps bounded below. Outputs are as before.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import RELOCATION_FAULTS
from .olmo import name_as_qwen
from .oracle import FULL, LINEAR, Oracle, rms_norm, rotate
from .retention import Retention

NORMS = ("g_norm_swish_gate", "g_norm")
"""What the outputs' norm is called where its gate is fused into it, and where not."""


class FlaOracle(Oracle):
    """What they have in common: a mixer and an MLP, each behind its norm."""

    names: ClassVar[dict[str, str]] = {
        **{"embeddings": "embed_tokens", "attn_norm": "input_layernorm"},
        "mlp_norm": "post_attention_layernorm",
    }

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        for name in [name for name in self._weights if ".attn." in name]:
            kind = self.layer_types[int(name.split(".")[1])]
            ours = ".linear_attn." if kind == LINEAR else ".self_attn."
            self._weights[name.replace(".attn.", ours)] = self._weights.pop(name)

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
    """Position-independent caching of a DeltaNet checkpoint, by definition."""

    model_types = ("delta_net",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.largest_beta = 2.0 if self.config.get("allow_neg_eigval") else 1.0
        w = self._weights
        for name in (f"layers.{i}.linear_attn" for i, kind in enumerate(self.layer_types) if kind == LINEAR):
            name_as_qwen(w, name, name)
            channels = len(w[f"{name}.in_proj_qkv.weight"])
            w.setdefault(f"{name}.conv1d.weight", torch.ones(channels, 1, 1, dtype=dtype))
            # What is not there is projected, and not looked at.
            values = w[f"{name}.out_proj.weight"].T
            w.setdefault(f"{name}.in_proj_z.weight", torch.zeros_like(values))
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


class DecayOracle(Retention, FlaOracle):
    """What RetNet and GLA have in common."""

    def _decays(self, name: str, x: Tensor) -> Tensor:
        """`g [n, H, K]`, of some axes perhaps 1."""
        raise NotImplementedError

    def _projected(self, index: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name, heads = f"layers.{index}.linear_attn", self.config["num_heads"]
        q, k, v = (self._linear(x, f"{name}.{part}_proj").view(len(x), heads, -1) for part in "qkv")
        return q, k, v, self._decays(name, x)

    def _closed(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        name = f"layers.{index}.linear_attn"
        norms = [w for part in NORMS if (w := self._weights.get(f"{name}.{part}.weight")) is not None]
        y = rms_norm(y, norms[0], self.eps).flatten(1)
        if self.config.get("use_output_gate", True):
            y = y * F.silu(self._linear(x, f"{name}.g_proj"))
        return self._linear(y, f"{name}.o_proj")


class RetNetOracle(DecayOracle):
    """Position-independent caching of a RetNet checkpoint, by definition."""

    model_types = ("retnet",)

    def faults(self) -> list[str]:
        turning = () if FULL in self.layer_types else ("stream_positions",)
        return [*super().faults(), *turning, *RELOCATION_FAULTS]

    def _decays(self, name: str, x: Tensor) -> Tensor:
        heads = torch.arange(self.config["num_heads"], dtype=self.dtype)
        return (1 - 2.0 ** (-5 - heads)).log()[None, :, None]

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        size = x.shape[-1]
        return rotate(x, positions, 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))


class GLAOracle(DecayOracle):
    """Position-independent caching of a GLA checkpoint, by definition."""

    model_types = ("gla",)

    def _decays(self, name: str, x: Tensor) -> Tensor:
        gates = self._linear(self._linear(x, f"{name}.gk_proj.0"), f"{name}.gk_proj.1")
        g = F.logsigmoid(gates.view(len(x), self.config["num_heads"], -1)) / 16
        bound = self.config.get("clamp_min")
        return g if bound is None else g.clamp(min=bound)


ORACLES = {oracle.model_types[0]: oracle for oracle in (DeltaNetOracle, RetNetOracle, GLAOracle)}
"""By model type."""
MODELS: dict[str, dict[str, Any]] = {
    "delta-net": {"kind": "delta_net", "expand_v": 2.0},
    "delta-net-gated": {"kind": "delta_net", "use_gate": True, "allow_neg_eigval": True, "tie": True},
    "delta-net-without-convolutions": {"kind": "delta_net", "use_short_conv": False},
    "delta-net-alone": {"kind": "delta_net", "group": None},
    "retnet": {"kind": "retnet", "expand_v": 2.0},
    "retnet-alone": {"kind": "retnet", "group": None, "use_output_gate": False},
    "gla": {"kind": "gla", "expand_k": 0.5},
    "gla-bounded": {"kind": "gla", "clamp_min": -0.05, "fuse_norm": False, "tie": True},
    "gla-alone": {"kind": "gla", "group": None},
}
"""Of `save_fla_model`, by name."""


def fla_oracle(model: str | Path, name: str) -> FlaOracle:
    return ORACLES[MODELS[name]["kind"]](model)
