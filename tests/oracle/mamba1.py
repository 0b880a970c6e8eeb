"""The oracle of models with Mamba layers, by the paper's recurrence (Gu and Dao, 2023). Per channel

    d_t = softplus(W_dt delta_t + b)    S_t = e^{A d_t} S_{t-1} + d_t x_t B_t
    y_t = (S_t . C_t + D x_t) silu(z_t)

where x is convolved, and delta, B and C are projections of it, in some models normed. A record's T is the
product of the factors e^{A d_t} of its interior, `[channels, N]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS, STATE_FAULTS
from .oracle import AttentionRecord, LinearRecord, LinearState, Oracle, causal_conv, last_rows, rms_norm
from .stream import Compose, Stream


@dataclass(frozen=True)
class Inputs:
    """A layer's rows: ``x, d [n, channels]``, its ``decay [n, channels, N]``, ``B, C [n, N]``."""

    x: Tensor
    d: Tensor
    decay: Tensor
    B: Tensor
    C: Tensor

    def rows(self, lo: int, hi: int) -> Inputs:
        return Inputs(*(t[lo:hi] for t in (self.x, self.d, self.decay, self.B, self.C)))


def scan(rows: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence from ``state [channels, N]``: outputs ``[n, channels]`` without D, and the end state."""
    outputs = torch.zeros_like(rows.x)
    for t in range(len(rows.x)):
        state = rows.decay[t] * state + torch.outer(rows.d[t] * rows.x[t], rows.B[t])
        outputs[t] = state @ rows.C[t]
    return outputs, state


class Mamba1Oracle(Oracle):
    """Position-independent caching of a checkpoint with Mamba layers, by definition."""

    model_types = ("jamba", "mamba", "falcon_mamba")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms_heads = False
        self.rank: int = self.config["rank"]
        self.size: int = self.config["size"]

    def faults(self) -> list[str]:
        kept = [fault for fault in STATE_FAULTS if fault != "T_transposed"]
        turning = {"wrong_rotation", "rotated_twice", "stream_positions", "separator_positions"}
        attends = "full_attention" in self.layer_types
        return [*SEAM_FAULTS, *kept, *(f for f in ATTENTION_FAULTS if attends and f not in turning)]

    @staticmethod
    def _understood(c: dict[str, Any]) -> dict[str, Any]:
        if c["model_type"] == "jamba":
            attends = [
                i % c["attn_layer_period"] == c["attn_layer_offset"] for i in range(c["num_hidden_layers"])
            ]
            return c | {
                "layer_types": ["full_attention" if it else "linear_attention" for it in attends],
                "head_dim": c["hidden_size"] // c["num_attention_heads"],
                "rank": c["mamba_dt_rank"],
                "size": c["mamba_d_state"],
            }
        return c | {
            "layer_types": ["linear_attention"] * c["num_hidden_layers"],
            "rms_norm_eps": c["layer_norm_epsilon"],
            "rank": c["time_step_rank"],
            "size": c["state_size"],
        }

    def _inverse_frequencies(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[LinearRecord | AttentionRecord]:
        key = (tokens, lo, hi)
        if key not in self._records:
            layers: list[LinearRecord | AttentionRecord] = []
            for kind, (first, second) in zip(self.layer_types, self._isolated(tokens), strict=True):
                if kind == "linear_attention":
                    inner = second.rows(lo, hi)
                    T = inner.decay.prod(0)
                    _, state = scan(inner, torch.zeros_like(T))
                    layers.append(LinearRecord(T, state, last_rows(first[:hi], self._reach)))
                else:
                    layers.append(AttentionRecord(first[lo:hi], second[lo:hi]))
            self._records[key] = layers
        return self._records[key]

    def _name(self, index: int) -> str:
        return f"layers.{index}.mamba" if self._is_jamba else f"backbone.layers.{index}.mixer"

    @property
    def _is_jamba(self) -> bool:
        return bool(self.config["model_type"] == "jamba")

    @property
    def _reach(self) -> int:
        index = self.layer_types.index("linear_attention")
        return int(self._weights[f"{self._name(index)}.conv1d.weight"].shape[-1]) - 1

    def _forward(
        self, stream: Stream, fault: str | None = None, compose_T: bool = True, keep: list | None = None
    ) -> tuple[Tensor, list[LinearState | None]]:
        names = {False: ("backbone.embeddings", "backbone.layers.{}.norm", "backbone.norm_f")}
        names[True] = "embed_tokens", "layers.{}.input_layernorm", "final_layernorm"
        embeddings, norm, last = names[self._is_jamba]
        x = self._weights[f"{embeddings}.weight"][list(stream.tokens)]
        states: list[LinearState | None] = []
        for index, kind in enumerate(self.layer_types):
            y, state = self._norm(x, norm.format(index)), None
            if kind == "linear_attention":
                y, rows, state = self._mamba(index, y, stream, fault, compose_T)
            else:
                y, rows = self._attention(index, y, stream, fault)
            states.append(state)
            if keep is not None:
                keep.append(rows)
            x = x + y
            if self._is_jamba:
                x = x + self._feed_forward(index, self._norm(x, f"layers.{index}.pre_ff_layernorm"))
        return self._norm(x, last), states

    def _feed_forward(self, index: int, x: Tensor) -> Tensor:
        """A gated MLP, or the mixture of the likeliest, by probabilities among all."""
        name = f"layers.{index}.feed_forward"

        def mlp(name: str) -> Tensor:
            inner = F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
            return self._linear(inner, f"{name}.down_proj")

        if f"{name}.router.weight" not in self._weights:
            return mlp(name)
        odds = self._linear(x, f"{name}.router").softmax(-1)
        chosen = torch.zeros_like(odds).scatter(
            -1, odds.topk(self.config["num_experts_per_tok"]).indices, 1.0
        )
        experts = [mlp(f"{name}.experts.{i}") for i in range(odds.shape[-1])]
        return torch.einsum("ne,nhe->nh", odds * chosen, torch.stack(experts, -1))

    def _mamba(
        self, index: int, u: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[Tensor, Inputs], LinearState]:
        """A Mamba layer of a stream: scan up to each compose point, compose, go on.

        Returns the output `[n, hidden]`, the rows `(pre-conv [n, channels], Inputs)` and the end state.
        """
        name = self._name(index)
        mixed, z = self._linear(u, f"{name}.in_proj").chunk(2, -1)
        channels = mixed.shape[1]
        state = LinearState(u.new_zeros(channels, self.size), u.new_zeros(self._reach, channels))
        inputs, outputs, begin = [], [], 0
        for piece in stream.pieces():
            own = mixed[begin : piece.end]
            rows = self._inputs(name, own, state.conv)
            out, S = scan(rows, state.S)
            inputs.append(rows)
            outputs.append(out + self._weights[f"{name}.D"] * rows.x)
            conv = last_rows(torch.cat((state.conv, own)), self._reach)
            state = LinearState(state.S if piece.island and fault != "island_in_states" else S, conv)
            begin = piece.end
            if piece.compose is not None:
                state = self._compose(state, index, piece.compose, fault, compose_T)
        columns = zip(*((r.x, r.d, r.decay, r.B, r.C) for r in inputs), strict=True)
        y = self._linear(torch.cat(outputs) * F.silu(z), f"{name}.out_proj")
        return y, (mixed, Inputs(*map(torch.cat, columns))), state

    def _inputs(self, name: str, mixed: Tensor, context: Tensor) -> Inputs:
        """Rows behind `context`, convolved and projected."""
        w = self._weights
        x = causal_conv(mixed, context, w[f"{name}.conv1d.weight"].squeeze(1), w[f"{name}.conv1d.bias"])
        parts = self._linear(x, f"{name}.x_proj").split([self.rank, self.size, self.size], -1)
        if self._is_jamba:
            parts = [
                self._norm(t, f"{name}.{p}_layernorm") for p, t in zip(("dt", "b", "c"), parts, strict=True)
            ]
        elif self.config["model_type"] == "falcon_mamba":
            parts = [rms_norm(t, torch.ones(()), self.config["mixer_rms_eps"]) for t in parts]
        delta, B, C = parts
        d = F.softplus(self._linear(delta, f"{name}.dt_proj"))
        return Inputs(x, d, (-w[f"{name}.A_log"].exp() * d[:, :, None]).exp(), B, C)

    def _compose(
        self, state: LinearState, index: int, compose: Compose, fault: str | None, compose_T: bool
    ) -> LinearState:
        lo = 0 if fault == "state_over_head" else compose.lo
        record = self._record(compose.tokens, lo, compose.hi)[index]
        assert isinstance(record, LinearRecord)
        T = torch.ones_like(record.T) if fault == "no_T" or not compose_T else record.T
        carried = torch.zeros_like(state.S) if fault == "forget_left" else T * state.S
        return LinearState(carried + record.S, state.conv if fault == "no_conv_tail" else record.conv)
