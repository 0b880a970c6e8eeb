"""The oracle of models with Mamba2 layers, by the paper's recurrence (Dao and Gu, 2024). Per head

    d_t = softplus(dt_t + dt_bias)   S_t = e^{-e^{A_log} d_t} S_{t-1} + d_t x_t B_t^T   y_t = S_t C_t + D x_t

with x, B and C convolved, and y gated and normed by groups. A record's T is the product of the factors of its
interior, one number a head.

Architectures put such layers, attention and MLPs together differently. So a *mixer* is what has a record, an
attention or a Mamba2 layer, numbered as they are run, and each architecture is one method that runs them.
Constants that scale what a projection takes or gives are multiplied into its weights when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS, STATE_FAULTS
from .oracle import (
    AttentionRecord,
    LinearRecord,
    LinearState,
    Oracle,
    causal_conv,
    last_rows,
    rms_norm,
)
from .stream import Compose, Stream

Mix = Callable[[Tensor], Tensor]
"""Runs the next mixer."""


@dataclass(frozen=True)
class Sizes:
    """Of Mamba2 layers: heads of ``head_dim``, ``groups`` of B and C of ``state`` elements; ``normed``: the
    gated output is normed by so many groups, 0: not at all."""

    heads: int
    head_dim: int
    groups: int
    state: int
    normed: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Inputs:
    """A layer's rows: ``x [n, H, P]``, ``d [n, H]`` and its ``decay [n, H]``, ``B, C [n, H, N]``."""

    x: Tensor
    d: Tensor
    decay: Tensor
    B: Tensor
    C: Tensor

    def rows(self, lo: int, hi: int) -> Inputs:
        return Inputs(*(t[lo:hi] for t in (self.x, self.d, self.decay, self.B, self.C)))


def scan(rows: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence from ``state [H, P, N]``: outputs ``[n, H, P]`` without D, and the end state."""
    outputs = torch.zeros_like(rows.x)
    for t in range(len(rows.x)):
        written = (rows.d[t][:, None] * rows.x[t])[:, :, None] * rows.B[t][:, None, :]
        state = rows.decay[t][:, None, None] * state + written
        outputs[t] = (state @ rows.C[t][:, :, None])[..., 0]
    return outputs, state


class Mamba2Oracle(Oracle):
    """Position-independent caching of a checkpoint with Mamba2 layers, by definition."""

    model_types = ("nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2")

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.norms_heads = False
        self.sizes: Sizes = self.config["sizes"]
        taken: dict[str, Tensor] = {}
        for index, (_, given) in enumerate(self.config["mixers"]):
            taken |= self._taken(index, given)
        self._weights |= taken

    def faults(self) -> list[str]:
        kept = [fault for fault in STATE_FAULTS if fault != "T_transposed"]
        turning = {"wrong_rotation", "rotated_twice", "stream_positions", "separator_positions"}
        attention = [f for f in ATTENTION_FAULTS if self.inv_freq.numel() or f not in turning]
        return [*SEAM_FAULTS, *kept, *attention]

    # ---- the configuration and the weights -----------------------------------------------------------------

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        given = DESCRIBED[config["model_type"]](config)
        known = {"hidden_act": "silu", "layer_types": [kind for kind, _ in given["mixers"]]}
        return config | known | given

    def _inverse_frequencies(self) -> Tensor:
        if not self.config["rotates"]:
            return torch.zeros(0, dtype=torch.float64)
        return super()._inverse_frequencies()

    def _taken(self, index: int, given: str) -> dict[str, Tensor]:
        """A mixer's weights under the names that are asked for here, constants multiplied in."""
        c, w, s = self.config, self._weights, self.sizes
        if c["layer_types"][index] == "linear_attention":
            names = [name for name in w if name.startswith(f"{given}.")]
            taken = {f"layers.{index}.mamba.{name.removeprefix(f'{given}.')}": w[name] for name in names}
            if (by_part := c.get("ssm_multipliers")) is not None:
                parts = (s.inner, s.inner, *[s.groups * s.state] * 2, s.heads)
                scale = torch.cat([torch.full((n,), m) for n, m in zip(parts, by_part, strict=True)])
                taken[f"layers.{index}.mamba.in_proj.weight"] = w[f"{given}.in_proj.weight"] * scale[:, None]
            return taken
        base, _, adapter = given.partition("+")
        taken = {f"layers.{index}.self_attn.{p}_proj.weight": w[f"{base}.{p}_proj.weight"] for p in "qkvo"}
        for part in "qkv" if adapter else "":
            first, second = (w[f"{base}.linear_{part}_adapter_list.{adapter}.{i}.weight"] for i in (0, 1))
            name = f"layers.{index}.self_attn.{part}_proj.weight"
            taken[name] = taken[name] + second @ first
        # `attend` divides by the root of the head size.
        factors = {"q": c["score_scale"] * c["head_dim"] ** 0.5, "k": c.get("key_multiplier", 1.0)}
        for part, factor in factors.items():
            name = f"layers.{index}.self_attn.{part}_proj.weight"
            taken[name] = taken[name] * factor
        return taken

    # ---- records -------------------------------------------------------------------------------------------

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[LinearRecord | AttentionRecord]:
        key = (tokens, lo, hi)
        if key not in self._records:
            layers: list[LinearRecord | AttentionRecord] = []
            for kind, (first, second) in zip(self.layer_types, self._isolated(tokens), strict=True):
                if kind == "linear_attention":
                    inner = second.rows(lo, hi)
                    _, state = scan(inner, first.new_zeros(self._state_shape))
                    conv = last_rows(first[:hi], self._reach)
                    layers.append(LinearRecord(inner.decay.prod(0), state, conv))
                else:
                    layers.append(AttentionRecord(first[lo:hi], second[lo:hi]))
            self._records[key] = layers
        return self._records[key]

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        return self.sizes.heads, self.sizes.head_dim, self.sizes.state

    @property
    def _reach(self) -> int:
        index = self.layer_types.index("linear_attention")
        return int(self._weights[f"layers.{index}.mamba.conv1d.weight"].shape[-1]) - 1

    # ---- the model -----------------------------------------------------------------------------------------

    def _forward(
        self, stream: Stream, fault: str | None = None, compose_T: bool = True, keep: list | None = None
    ) -> tuple[Tensor, list[LinearState | None]]:
        states: list[LinearState | None] = []

        def mixers() -> Iterator[Tensor]:
            given = yield torch.zeros(0)
            for index, kind in enumerate(self.layer_types):
                if kind == "linear_attention":
                    out, rows, state = self._mamba(index, given, stream, fault, compose_T)
                    states.append(state)
                else:
                    out, rows = self._attention(index, given, stream, fault)
                    states.append(None)
                if keep is not None:
                    keep.append(rows)
                given = yield out

        running = mixers()
        next(running)
        x = self._embeddings()[list(stream.tokens)] * self.config.get("embedding_multiplier", 1.0)
        walk = getattr(self, f"_{self.config['model_type']}")
        return walk(x, running.send), states

    def _nemotron_h(self, x: Tensor, mix: Mix) -> Tensor:
        for i, kind in enumerate(self.config["layers_block_type"]):
            y = self._norm(x, f"backbone.layers.{i}.norm")
            if kind == "mlp":
                name = f"backbone.layers.{i}.mixer"
                x = x + self._linear(self._linear(y, f"{name}.up_proj").relu() ** 2, f"{name}.down_proj")
            else:
                x = x + mix(y)
        return self._norm(x, "backbone.norm_f")

    def _granitemoehybrid(self, x: Tensor, mix: Mix) -> Tensor:
        scale = self.config["residual_multiplier"]
        for i in range(self.config["num_hidden_layers"]):
            x = x + scale * mix(self._norm(x, f"layers.{i}.input_layernorm"))
            y = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = self._linear(y, f"layers.{i}.shared_mlp.input_linear").chunk(2, -1)
            x = x + scale * self._linear(F.silu(gate) * up, f"layers.{i}.shared_mlp.output_linear")
        return self._norm(x, "norm")

    def _falcon_h1(self, x: Tensor, mix: Mix) -> Tensor:
        c = self.config
        of_gate, of_down = c["mlp_multipliers"]
        for i in range(c["num_hidden_layers"]):
            y, name = self._norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.feed_forward"
            attended = c["attention_out_multiplier"] * mix(c["attention_in_multiplier"] * y)
            x = x + attended + c["ssm_out_multiplier"] * mix(c["ssm_in_multiplier"] * y)
            y = self._norm(x, f"layers.{i}.pre_ff_layernorm")
            inner = F.silu(of_gate * self._linear(y, f"{name}.gate_proj")) * self._linear(
                y, f"{name}.up_proj"
            )
            x = x + of_down * self._linear(inner, f"{name}.down_proj")
        return self._norm(x, "final_layernorm")

    def _zamba2(self, x: Tensor, mix: Mix) -> Tensor:
        first, block = x, 0
        for i, kind in enumerate(self.config["layers_block_type"]):
            y, name = x, f"layers.{i}"
            if kind == "hybrid":
                shared = self.config["shared"][block % self.config["num_mem_blocks"]]
                y = mix(self._norm(torch.cat((x, first), -1), f"{shared}.input_layernorm"))
                y = self._norm(y, f"{shared}.pre_ff_layernorm")
                mlp = f"{shared}.feed_forward"
                adapter = f"{mlp}.gate_up_proj_adapter_list.{block}"
                both = self._linear(y, f"{mlp}.gate_up_proj")
                both = both + self._linear(self._linear(y, f"{adapter}.0"), f"{adapter}.1")
                gate, up = both.chunk(2, -1)
                y = x + self._linear(self._linear(F.gelu(gate) * up, f"{mlp}.down_proj"), f"{name}.linear")
                block, name = block + 1, f"{name}.mamba_decoder"
            x = x + mix(self._norm(y, f"{name}.input_layernorm"))
        return self._norm(x, "final_layernorm")

    def _mamba(
        self, index: int, u: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[Tensor, Inputs], LinearState]:
        """A Mamba2 layer of a stream: scan up to each compose point, compose, go on.

        Returns the output `[n, hidden]`, the rows `(pre-conv [n, channels], Inputs)` and the end state.
        """
        w, name, s = self._weights, f"layers.{index}.mamba", self.sizes
        z, mixed, dt = self._linear(u, f"{name}.in_proj").split(
            [s.inner, s.inner + 2 * s.groups * s.state, s.heads], -1
        )
        d = F.softplus(dt + w[f"{name}.dt_bias"])
        decay = (-w[f"{name}.A_log"].exp() * d).exp()
        state = LinearState(u.new_zeros(self._state_shape), u.new_zeros(self._reach, mixed.shape[1]))
        inputs, outputs, begin = [], [], 0
        for piece in stream.pieces():
            rows = self._inputs(index, mixed[begin : piece.end], state.conv, d, decay, begin)
            out, S = scan(rows, state.S)
            inputs.append(rows)
            outputs.append(out + w[f"{name}.D"][:, None] * rows.x)
            conv = last_rows(torch.cat((state.conv, mixed[begin : piece.end])), self._reach)
            state = LinearState(state.S if piece.island and fault != "island_in_states" else S, conv)
            begin = piece.end
            if piece.compose is not None:
                state = self._compose(state, index, piece.compose, fault, compose_T)
        y = torch.cat(outputs).flatten(1) * F.silu(z)
        if s.normed:
            y = rms_norm(y.unflatten(-1, (s.normed, -1)), torch.ones(()), self.eps).flatten(1)
            y = y * w[f"{name}.norm.weight"]
        columns = zip(*((r.x, r.d, r.decay, r.B, r.C) for r in inputs), strict=True)
        return self._linear(y, f"{name}.out_proj"), (mixed, Inputs(*map(torch.cat, columns))), state

    def _inputs(
        self, index: int, mixed: Tensor, context: Tensor, d: Tensor, decay: Tensor, begin: int
    ) -> Inputs:
        """Rows behind `context`, convolved and by head."""
        s, conv = self.sizes, f"layers.{index}.mamba.conv1d"
        end = begin + len(mixed)
        found = causal_conv(
            mixed, context, self._weights[f"{conv}.weight"].squeeze(1), self._weights[f"{conv}.bias"]
        )
        x, B, C = found.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
        B, C = (
            t.unflatten(-1, (s.groups, s.state)).repeat_interleave(s.heads // s.groups, 1) for t in (B, C)
        )
        return Inputs(x.unflatten(-1, (s.heads, s.head_dim)), d[begin:end], decay[begin:end], B, C)

    def _compose(
        self, state: LinearState, index: int, compose: Compose, fault: str | None, compose_T: bool
    ) -> LinearState:
        lo = 0 if fault == "state_over_head" else compose.lo
        record = self._record(compose.tokens, lo, compose.hi)[index]
        assert isinstance(record, LinearRecord)
        T = torch.ones_like(record.T) if fault == "no_T" or not compose_T else record.T
        carried = torch.zeros_like(state.S) if fault == "forget_left" else T[:, None, None] * state.S
        return LinearState(carried + record.S, state.conv if fault == "no_conv_tail" else record.conv)

    def _embeddings(self) -> Tensor:
        return self._weights[self.config.get("embeddings", "embed_tokens.weight")]

    def _logprobs(self, hidden: Tensor) -> Tensor:
        c = self.config
        matrix = self._embeddings() if c["tie_word_embeddings"] else self._weights["lm_head.weight"]
        scale = c.get("lm_head_multiplier", 1.0) / c.get("logits_scaling", 1.0)
        return (hidden @ matrix.T * scale).log_softmax(-1)


# -- what each architecture calls things ---------------------------------------------------------------------


def _nemotron_h(c: dict[str, Any]) -> dict[str, Any]:
    kinds = enumerate(c["layers_block_type"])
    groups = c["n_groups"]
    return {
        "mixers": [(kind, f"backbone.layers.{i}.mixer") for i, kind in kinds if kind != "mlp"],
        "sizes": Sizes(c["mamba_num_heads"], c["mamba_head_dim"], groups, c["ssm_state_size"], groups),
        "rotates": False,
        "rms_norm_eps": c["layer_norm_epsilon"],
        "score_scale": c["head_dim"] ** -0.5,
        "embeddings": "backbone.embeddings.weight",
    }


def _granite(c: dict[str, Any]) -> dict[str, Any]:
    names = {"linear_attention": "mamba", "full_attention": "self_attn"}
    return {
        "mixers": [(kind, f"layers.{i}.{names[kind]}") for i, kind in enumerate(c["layer_types"])],
        "sizes": Sizes(c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"], c["mamba_d_state"], 1),
        "rotates": c["position_embedding_type"] == "rope",
        "head_dim": c["hidden_size"] // c["num_attention_heads"],
        "score_scale": c["attention_multiplier"],
    }


def _falcon(c: dict[str, Any]) -> dict[str, Any]:
    mixers = []
    for i in range(c["num_hidden_layers"]):
        mixers += [("full_attention", f"layers.{i}.self_attn"), ("linear_attention", f"layers.{i}.mamba")]
    normed = c["mamba_n_groups"] if c["mamba_rms_norm"] else 0
    return {
        "mixers": mixers,
        "sizes": Sizes(
            c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"], c["mamba_d_state"], normed
        ),
        "rotates": True,
        "score_scale": c["head_dim"] ** -0.5,
    }


def _zamba(c: dict[str, Any]) -> dict[str, Any]:
    shared: list[str] = []
    mixers, block = [], 0
    for i, kind in enumerate(c["layers_block_type"]):
        name = f"layers.{i}"
        if kind == "hybrid":
            if len(shared) < c["num_mem_blocks"]:
                shared.append(f"{name}.shared_transformer")
            attention = f"{shared[block % c['num_mem_blocks']]}.self_attn"
            mixers.append(("full_attention", f"{attention}+{block}"))
            block, name = block + 1, f"{name}.mamba_decoder"
        mixers.append(("linear_attention", f"{name}.mamba"))
    head_dim = 2 * c["hidden_size"] // c["num_attention_heads"]
    inner, heads, groups = c["mamba_expand"] * c["hidden_size"], c["n_mamba_heads"], c["mamba_ngroups"]
    return {
        "mixers": mixers,
        "shared": shared,
        "sizes": Sizes(heads, inner // heads, groups, c["mamba_d_state"], groups),
        "rotates": c["use_mem_rope"],
        "head_dim": head_dim,
        "score_scale": (head_dim / 2) ** -0.5,
    }


DESCRIBED = {
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "zamba2": _zamba,
}
