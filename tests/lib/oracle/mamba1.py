"""The oracle of models with Mamba layers, by the paper's recurrence (Gu and Dao, 2023). Per channel

    d_t = softplus(W_dt delta_t + b)    S_t = e^{A d_t} S_{t-1} + d_t x_t B_t
    y_t = (S_t . C_t + D x_t) silu(z_t)

where x is convolved, and delta, B and C are projections of it, in some models normed. A record's T is the
product of the factors e^{A d_t} of its interior, `[channels, N]`.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .mamba2 import Inputs, MambaOracle
from .oracle import FULL, LINEAR, LinearState, rms_norm
from .stream import Stream


class Mamba1Oracle(MambaOracle):
    """Position-independent caching of a checkpoint with Mamba layers, by definition."""

    model_types = ("jamba", "mamba", "falcon_mamba")
    names: ClassVar[dict[str, str]] = MambaOracle.names | {
        **{"mixer": "mamba", "norm": "input_layernorm", "norm_f": "final_layernorm"},
    }
    last_norm = "final_layernorm"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank: int = self.config["rank"]
        self.size: int = self.config["size"]

    @staticmethod
    def _understood(c: dict[str, Any]) -> dict[str, Any]:
        if c["model_type"] == "jamba":
            period, offset = c["attn_layer_period"], c["attn_layer_offset"]
            kinds = [FULL if i % period == offset else LINEAR for i in range(c["num_hidden_layers"])]
            return c | {
                "layer_types": kinds,
                "rotates": False,
                "head_dim": c["hidden_size"] // c["num_attention_heads"],
                "rank": c["mamba_dt_rank"],
                "size": c["mamba_d_state"],
            }
        return c | {
            "layer_types": [LINEAR] * c["num_hidden_layers"],
            "rotates": False,
            "rms_norm_eps": c["layer_norm_epsilon"],
            "rank": c["time_step_rank"],
            "size": c["state_size"],
        }

    @property
    def _is_jamba(self) -> bool:
        return bool(self.config["model_type"] == "jamba")

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        """Each channel is a head of one channel."""
        index = self.layer_types.index(LINEAR)
        return len(self._weights[f"{self._name(index)}.D"]), 1, self.size

    def _layer(self, index: int, x: Tensor, *given: Any) -> tuple[Tensor, tuple, LinearState | None]:
        y, *kept = self._mixer(index, self._norm(x, f"layers.{index}.input_layernorm"), *given)
        x = x + y
        if self._is_jamba:
            x = x + self._feed_forward(index, self._norm(x, f"layers.{index}.pre_ff_layernorm"))
        return x, *kept

    def _feed_forward(self, index: int, x: Tensor) -> Tensor:
        """A gated MLP, or the mixture of the likeliest, by probabilities among all."""
        name = f"layers.{index}.feed_forward"
        if f"{name}.router.weight" not in self._weights:
            return self._gated(x, name)
        odds = self._linear(x, f"{name}.router").softmax(-1)
        likeliest = odds.topk(self.config["num_experts_per_tok"]).indices
        chosen = torch.zeros_like(odds).scatter(-1, likeliest, 1.0)
        experts = [self._gated(x, f"{name}.experts.{i}") for i in range(odds.shape[-1])]
        return torch.einsum("ne,nhe->nh", odds * chosen, torch.stack(experts, -1))

    def _delta_net(
        self, index: int, u: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[Tensor, Inputs], LinearState]:
        """A Mamba layer of a stream: its output `[n, hidden]`, the rows and the end state."""
        w, name = self._weights, self._name(index)
        mixed, z = self._linear(u, f"{name}.in_proj").chunk(2, -1)

        def inputs(x: Tensor, _: slice) -> Inputs:
            parts = self._linear(x, f"{name}.x_proj").split([self.rank, self.size, self.size], -1)
            if self._is_jamba:
                norms = [f"{name}.{part}_layernorm" for part in ("dt", "b", "c")]
                parts = [self._norm(t, norm) for t, norm in zip(parts, norms, strict=True)]
            elif self.config["model_type"] == "falcon_mamba":
                parts = [rms_norm(t, torch.ones(()), self.config["mixer_rms_eps"]) for t in parts]
            delta, B, C = parts
            d = F.softplus(self._linear(delta, f"{name}.dt_proj"))
            decay = (-w[f"{name}.A_log"].exp() * d[:, :, None]).exp()
            return Inputs(x[..., None], d, decay, B[:, None], C[:, None])

        y, rows, state = self._scanned(index, mixed, inputs, stream, fault, compose_T)
        return self._linear(y.flatten(1) * F.silu(z), f"{name}.out_proj"), rows, state
