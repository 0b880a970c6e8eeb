"""The oracle of models with Mamba2 layers, by the paper's recurrence (Dao and Gu, 2024). Per head

    d_t = softplus(dt_t + dt_bias)   S_t = e^{-e^{A_log} d_t} S_{t-1} + d_t x_t B_t^T   y_t = S_t C_t + D x_t

with x, B and C convolved, and y gated and normed by groups. A record's T is the product of the factors of its
interior, one number a head.

Architectures put such layers, attention and MLPs together differently. So a *mixer* is what has a record, an
attention or a Mamba2 layer, numbered as they are run, and each architecture is one method that runs them.
Constants that scale what a projection takes or gives are multiplied into its weights when they are read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta import Rows
from .faults import ROTATION_FAULTS
from .oracle import FULL, LINEAR, LinearRecord, LinearState, Oracle, causal_conv, last_rows, rms_norm
from .stream import Stream

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
class Inputs(Rows):
    """A layer's rows: ``x [n, H, P]``, ``d [n, H]``, ``B, C [n, H, N]`` and its ``decay [n, H, N]``, of some
    axes perhaps 1."""

    x: Tensor
    d: Tensor
    decay: Tensor
    B: Tensor
    C: Tensor


def scan(rows: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence from ``state [H, P, N]``: outputs ``[n, H, P]`` without D, and the end state."""
    outputs = torch.zeros_like(rows.x)
    for t in range(len(rows.x)):
        written = (rows.d[t][:, None] * rows.x[t])[:, :, None] * rows.B[t][:, None, :]
        state = rows.decay[t][:, None] * state + written
        outputs[t] = (state @ rows.C[t][:, :, None])[..., 0]
    return outputs, state


class MambaOracle(Oracle):
    """What Mamba1 and Mamba2 have in common."""

    names: ClassVar[dict[str, str]] = {"embeddings": "embed_tokens"}

    def faults(self) -> list[str]:
        """Without rotation, those of rotation do not show."""
        unseen = ("T_transposed", *(() if self.inv_freq.numel() else ROTATION_FAULTS))
        return [fault for fault in super().faults() if fault not in unseen]

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        raise NotImplementedError

    def _name(self, index: int) -> str:
        """Of a linear layer's weights."""
        return f"layers.{index}.mamba"

    @property
    def _reach(self) -> int:
        index = self.layer_types.index(LINEAR)
        return int(self._weights[f"{self._name(index)}.conv1d.weight"].shape[-1]) - 1

    def _summary(self, mixed: Tensor, inputs: Inputs, lo: int, hi: int) -> LinearRecord:
        inner = inputs.rows(lo, hi)
        _, state = scan(inner, mixed.new_zeros(self._state_shape))
        return LinearRecord(inner.decay.prod(0)[:, None], state, last_rows(mixed[:hi], self._reach))

    def _carried(self, T: Tensor, S: Tensor) -> Tensor:
        return T * S

    def _scanned(
        self,
        index: int,
        mixed: Tensor,
        inputs: Callable[[Tensor, slice], Inputs],
        stream: Stream,
        fault: str | None,
        compose_T: bool,
    ) -> tuple[Tensor, tuple[Tensor, Inputs], LinearState]:
        """A layer of a stream: outputs `[n, H, P]`, rows `(pre-conv [n, C], Inputs)` and the end state.

        `inputs` are made of convolved rows, and of the place of these in the stream.
        """
        name, w, reach = self._name(index), self._weights, self._reach
        kernel, bias = w[f"{name}.conv1d.weight"].squeeze(1), w[f"{name}.conv1d.bias"]
        found, outputs = [], []

        def run(state: LinearState, begin: int, end: int) -> LinearState:
            own = mixed[begin:end]
            rows = inputs(causal_conv(own, state.conv, kernel, bias), slice(begin, end))
            out, S = scan(rows, state.S)
            found.append(rows)
            outputs.append(out + w[f"{name}.D"][:, None] * rows.x)
            return LinearState(S, last_rows(torch.cat((state.conv, own)), reach))

        state = LinearState(mixed.new_zeros(self._state_shape), mixed.new_zeros(reach, mixed.shape[1]))
        state = self._walk(index, stream, state, run, fault, compose_T)
        return torch.cat(outputs), (mixed, Inputs.cat(found)), state


class Mamba2Oracle(MambaOracle):
    """Position-independent caching of a checkpoint with Mamba2 layers, by definition."""

    model_types = ("nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2")

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self.sizes: Sizes = self.config["sizes"]
        taken: dict[str, Tensor] = {}
        for index, (_, given) in enumerate(self.config["mixers"]):
            taken |= self._taken(index, given)
        self._weights |= taken

    # ---- the configuration and the weights -----------------------------------------------------------------

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        given = DESCRIBED[config["model_type"]](config)
        known = {"hidden_act": "silu", "layer_types": [kind for kind, _ in given["mixers"]]}
        return config | known | given

    def _taken(self, index: int, given: str) -> dict[str, Tensor]:
        """A mixer's weights under the names that are asked for here, constants multiplied in."""
        c, w, s = self.config, self._weights, self.sizes
        if c["layer_types"][index] == LINEAR:
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

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        return self.sizes.heads, self.sizes.head_dim, self.sizes.state

    # ---- the model -----------------------------------------------------------------------------------------

    def _forward(
        self, stream: Stream, fault: str | None = None, compose_T: bool = True, keep: list | None = None
    ) -> tuple[Tensor, list[LinearState | None]]:
        states: list[LinearState | None] = []

        def mixers() -> Iterator[Tensor]:
            given = yield torch.zeros(0)
            for index in range(len(self.layer_types)):
                out, rows, state = self._mixer(index, given, stream, fault, compose_T)
                states.append(state)
                if keep is not None:
                    keep.append(rows)
                given = yield out

        running = mixers()
        next(running)
        x = self._embedded(stream) * self.config.get("embedding_multiplier", 1.0)
        walk = getattr(self, f"_{self.config['model_type']}")
        return walk(x, running.send), states

    def _nemotron_h(self, x: Tensor, mix: Mix) -> Tensor:
        for i, kind in enumerate(self.config["layers_block_type"]):
            y = self._norm(x, f"layers.{i}.norm")
            if kind == "mlp":
                name = f"layers.{i}.mixer"
                x = x + self._linear(self._linear(y, f"{name}.up_proj").relu() ** 2, f"{name}.down_proj")
            else:
                x = x + mix(y)
        return self._norm(x, "norm_f")

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
            y, mlp = self._norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.feed_forward"
            attended = c["attention_out_multiplier"] * mix(c["attention_in_multiplier"] * y)
            x = x + attended + c["ssm_out_multiplier"] * mix(c["ssm_in_multiplier"] * y)
            y = self._norm(x, f"layers.{i}.pre_ff_layernorm")
            gate, up = (self._linear(y, f"{mlp}.{part}_proj") for part in ("gate", "up"))
            x = x + of_down * self._linear(F.silu(of_gate * gate) * up, f"{mlp}.down_proj")
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

    def _delta_net(
        self, index: int, u: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[Tensor, Inputs], LinearState]:
        """A Mamba2 layer of a stream: its output `[n, hidden]`, the rows and the end state."""
        w, name, s = self._weights, self._name(index), self.sizes
        z, mixed, dt = self._linear(u, f"{name}.in_proj").split(
            [s.inner, s.inner + 2 * s.groups * s.state, s.heads], -1
        )
        d = F.softplus(dt + w[f"{name}.dt_bias"])
        decay = (-w[f"{name}.A_log"].exp() * d).exp()[..., None]

        def inputs(convolved: Tensor, at: slice) -> Inputs:
            x, *both = convolved.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
            repeats = s.heads // s.groups
            B, C = (t.unflatten(-1, (s.groups, s.state)).repeat_interleave(repeats, 1) for t in both)
            return Inputs(x.unflatten(-1, (s.heads, s.head_dim)), d[at], decay[at], B, C)

        y, rows, state = self._scanned(index, mixed, inputs, stream, fault, compose_T)
        y = y.flatten(1) * F.silu(z)
        if s.normed:
            y = rms_norm(y.unflatten(-1, (s.normed, -1)), torch.ones(()), self.eps).flatten(1)
            y = y * w[f"{name}.norm.weight"]
        return self._linear(y, f"{name}.out_proj"), rows, state

    def _logprobs(self, hidden: Tensor) -> Tensor:
        scale = self.config.get("lm_head_multiplier", 1.0) / self.config.get("logits_scaling", 1.0)
        return super()._logprobs(hidden * scale)


# -- what each architecture calls things ---------------------------------------------------------------------


def _nemotron_h(c: dict[str, Any]) -> dict[str, Any]:
    kinds = enumerate(c["layers_block_type"])
    groups = c["n_groups"]
    return {
        "mixers": [(kind, f"layers.{i}.mixer") for i, kind in kinds if kind != "mlp"],
        "sizes": Sizes(c["mamba_num_heads"], c["mamba_head_dim"], groups, c["ssm_state_size"], groups),
        "rotates": False,
        "rms_norm_eps": c["layer_norm_epsilon"],
        "score_scale": c["head_dim"] ** -0.5,
    }


def _granite(c: dict[str, Any]) -> dict[str, Any]:
    names = {LINEAR: "mamba", FULL: "self_attn"}
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
        mixers += [(FULL, f"layers.{i}.self_attn"), (LINEAR, f"layers.{i}.mamba")]
    groups = c["mamba_n_groups"]
    normed = groups if c["mamba_rms_norm"] else 0
    return {
        "mixers": mixers,
        "sizes": Sizes(c["mamba_n_heads"], c["mamba_d_head"], groups, c["mamba_d_state"], normed),
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
            mixers.append((FULL, f"{attention}+{block}"))
            block, name = block + 1, f"{name}.mamba_decoder"
        mixers.append((LINEAR, f"{name}.mamba"))
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


DESCRIBED = {"nemotron_h": _nemotron_h, "granitemoehybrid": _granite, "falcon_h1": _falcon, "zamba2": _zamba}
