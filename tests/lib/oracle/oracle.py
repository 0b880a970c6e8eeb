"""What position-independent caching must compute, in plain torch and double precision.

This is the reference the engine is measured against. It is written from the design document alone (sections
2 to 4) and shares no code with the plugin: no vLLM, no kernels, no paging, no chunking. Every quantity is the
shortest expression of its definition, and every linear layer is scanned token by token.

**Terms.** A prompt is a leading segment, interior segments and a query. A segment's *interior* is its rows
`[head, n - tail)` (all rows of the leading segment). What is not interior is computed in the request's own
*stream*, at its logical position:

    stream = [head of seg 1][tail of seg 1][head of seg 2] ... [query][generated]

**Records.** Every segment is run alone through the whole model: position 0, zero states, zero conv context.
Its interior rows of that run leave, per full-attention layer, unrotated K and V, and per linear layer

    T = T_n ... T_1      S = end state over the interior from a zero start      conv = last k-1 pre-conv rows

**Compose point.** It stands after a segment's head and before its tail. There `S <- T S + S_C`, the conv
context becomes the record's, and the segment's public K and V become visible, K rotated at
`segment start + offset`.

States are `[value heads, d_k, d_v]`. In that order the gated delta rule is

    S_i = e^{g_i} (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T        o_i = S_i^T q_i / sqrt(d_k)

A row of a layer with a sliding window of W tokens sees its own logical position and the W - 1 before it.

Supported checkpoints: Qwen3.5 text models (gated delta net + gated attention), dense Qwen3, and Llama, whose
layers may have windows.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from . import faults
from .delta import DeltaInputs, interior_summary, scan
from .faults import FAULTS
from .stream import Compose, Stream, build_stream

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class LinearRecord:
    """What an interior leaves in one linear layer: `T [HV, K, K]`, `S [HV, K, V]`, `conv [k-1, C]`."""

    T: Tensor
    S: Tensor
    conv: Tensor


@dataclass(frozen=True)
class AttentionRecord:
    """What an interior leaves in one full-attention layer: unrotated `k` and `v`, `[rows, KV heads, D]`."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Public:
    """Rows of a record that stream tokens from `first_row` on see: unrotated `k` and `v`, their offsets in
    the segment and their positions in the prompt."""

    k: Tensor
    v: Tensor
    offset: Tensor
    position: Tensor
    first_row: int


@dataclass(frozen=True)
class LinearState:
    """A running linear layer: `S [HV, K, V]` and its conv context, the last k-1 pre-conv rows `[k-1, C]`."""

    S: Tensor
    conv: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last axis."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotary embedding (half-split layout) of the first `2 * len(inv_freq)` channels; the others pass.

    `x [n, H, D]`, `positions [n]`.
    """
    angle = positions.to(inv_freq)[:, None] * inv_freq
    cos, sin = angle.cos().to(x)[:, None], angle.sin().to(x)[:, None]
    half = inv_freq.numel()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scores: Callable[[Tensor], Tensor]) -> Tensor:
    """Grouped-query attention, one softmax of `scores` of the products over what is `visible [n, m]`.

    `q [n, H, D]`, `k, v [m, KVH, D]` -> `[n, H, D]`.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    found = scores(torch.einsum("nhd,mhd->hnm", q, k))
    return torch.einsum("hnm,mhd->nhd", found.masked_fill(~visible, float("-inf")).softmax(-1), v)


def causal_conv(rows: Tensor, context: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Depthwise causal convolution and silu: `rows [n, C]` after `context [k-1, C]`, `weight [C, k]`."""
    x = torch.cat((context, rows))
    n, width = rows.shape[0], weight.shape[1]
    return F.silu(sum(x[j : j + n] * weight[:, j] for j in range(width)) + bias)


def last_rows(rows: Tensor, count: int) -> Tensor:
    """The last `count` rows, with zero rows before them where there are fewer."""
    rows = rows[max(0, rows.shape[0] - count) :]
    return F.pad(rows, (0, 0, count - rows.shape[0], 0))


class Oracle:
    """Position-independent caching of one checkpoint, by definition.

    `dtype` is that of all arithmetic; weights are read as stored (a bf16 checkpoint keeps its rounding).
    Isolated runs and records are kept, so asking again about the same segments costs the stream only.
    """

    model_types: tuple[str, ...] = ("qwen3_5_text", "qwen3", "llama")
    names: ClassVar[dict[str, str]] = {}
    """What parts of weights' names are called here."""
    last_norm = "norm"
    largest_beta = 1.0
    """Factor of the delta rule's `beta`: 2 where the configuration allows negative eigenvalues."""

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        path = Path(model_dir)
        config = json.loads((path / "config.json").read_text())
        config = self._understood(config.get("text_config", config))
        self.config, self.dtype = config, dtype
        if config["model_type"] not in self.model_types:
            raise ValueError(f"the oracle does not know model type {config['model_type']!r}")
        # Qwen3.5 stores norms as an offset from 1 and doubles q_proj with an output gate; Qwen3 does neither.
        self.is_qwen35 = config["model_type"] == "qwen3_5_text"
        self.layer_types: list[str] = config["layer_types"]
        known = {LINEAR, FULL, "sliding_attention"}
        if set(self.layer_types) - known or config["hidden_act"] != "silu":
            raise ValueError("the oracle knows full, sliding and linear attention with silu only")
        self.eps = config["rms_norm_eps"]
        self.inv_freq = self._inverse_frequencies()
        self._weights = self._load(path)
        self._runs: dict[tuple[int, ...], list] = {}
        self._records: dict[tuple, list] = {}

    # ---- what callers ask ----------------------------------------------------------------------------------

    def next_token_logprobs(self, leading, segments, query, **options) -> Tensor:
        """Log-probabilities `[vocab]` of the token that follows the query and what has been `generated`.

        `options`: those of :func:`.stream.build_stream`. `compose_T=False` is the naive method, T is 1;
        `fault` plants one of `FAULTS`, or of those of contexts and islands.
        """
        return self._logprobs(self._run(leading, segments, query, **options)[0][-1])

    def state_after(self, leading, segments, query, **options) -> list[LinearState | None]:
        """Each layer's state after the stream's last token and compose point (None for full attention).

        Takes the arguments of `next_token_logprobs`.
        """
        return self._run(leading, segments, query, **options)[1]

    def full_logprobs(self, tokens: Sequence[int], *, all_rows: bool = False) -> Tensor:
        """Ordinary full recompute: log-probabilities after the last token `[vocab]`, or all `[n, vocab]`."""
        hidden, _ = self._forward(Stream(tuple(tokens), tuple(range(len(tokens)))))
        return self._logprobs(hidden if all_rows else hidden[-1])

    def full_state(self, tokens: Sequence[int]) -> list[LinearState | None]:
        """Each layer's state after an ordinary run over `tokens` (None for full attention)."""
        return self._forward(Stream(tuple(tokens), tuple(range(len(tokens)))))[1]

    def record(
        self, tokens: Sequence[int], *, head: int = 8, tail: int = 8, leading: bool = False
    ) -> list[LinearRecord | AttentionRecord]:
        """The record of a segment, layer by layer. A leading segment is recorded whole."""
        lo, hi = (0, len(tokens)) if leading else (head, len(tokens) - tail)
        return self._record(tuple(tokens), lo, hi)

    def faults(self) -> list[str]:
        """The faults that can show in this model: those of the layer kinds it has."""
        kinds = set(self.layer_types)
        names = list(faults.SEAM_FAULTS)
        names += faults.STATE_FAULTS if LINEAR in kinds else []
        names += faults.ATTENTION_FAULTS if kinds - {LINEAR} else []
        return names

    # ---- records -------------------------------------------------------------------------------------------

    def _isolated(self, tokens: tuple[int, ...]) -> list:
        """Run a segment alone; per layer `(k, v)` or `(pre-conv rows, DeltaInputs)` of all its rows."""
        if tokens not in self._runs:
            rows: list = []
            self._forward(Stream(tokens, tuple(range(len(tokens)))), keep=rows)
            self._runs[tokens] = rows
        return self._runs[tokens]

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[LinearRecord | AttentionRecord]:
        """Summarise rows `[lo, hi)` of a segment's isolated run, layer by layer."""
        key = (tokens, lo, hi)
        if key not in self._records:
            self._records[key] = [
                self._summary(first, second, lo, hi)
                if kind == LINEAR
                else AttentionRecord(first[lo:hi], second[lo:hi])
                for kind, (first, second) in zip(self.layer_types, self._isolated(tokens), strict=True)
            ]
        return self._records[key]

    def _summary(self, mixed: Tensor, inputs: DeltaInputs, lo: int, hi: int) -> LinearRecord:
        """What rows `[lo, hi)` of an isolated run leave in a linear layer."""
        # Where the interior is shorter than k-1 rows, the rows before it complete the context.
        conv = last_rows(mixed[:hi], self.config["linear_conv_kernel_dim"] - 1)
        return LinearRecord(*interior_summary(inputs.rows(lo, hi)), conv)

    # ---- the model -----------------------------------------------------------------------------------------

    def _run(
        self,
        leading: Sequence[int],
        segments: Sequence[Sequence[int]],
        query: Sequence[int],
        *,
        fault: str | None = None,
        compose_T: bool = True,
        **layout,
    ) -> tuple[Tensor, list[LinearState | None]]:
        """Lay the prompt out and run its stream."""
        known = FAULTS | faults.MORE_FAULTS
        if fault is not None and fault not in known:
            raise ValueError(f"unknown fault {fault!r}; known: {', '.join(known)}")
        stream = build_stream(leading, segments, query, fault=fault, **layout)
        return self._forward(stream, fault, compose_T)

    def _forward(
        self, stream: Stream, fault: str | None = None, compose_T: bool = True, keep: list | None = None
    ) -> tuple[Tensor, list[LinearState | None]]:
        """Hidden states `[n, hidden]` after the final norm, and the linear layers' end states.

        A `keep` list receives the rows of every layer, from which records are made.
        """
        if not stream.tokens:
            raise ValueError("the stream is empty: there is nothing to compute")
        x = self._embedded(stream)
        states: list[LinearState | None] = []
        for index in range(len(self.layer_types)):
            x, rows, state = self._layer(index, x, stream, fault, compose_T)
            states.append(state)
            if keep is not None:
                keep.append(rows)
        return self._norm(x, self.last_norm), states

    def _embedded(self, stream: Stream) -> Tensor:
        return self._weights["embed_tokens.weight"][list(stream.tokens)]

    def _layer(self, index: int, x: Tensor, *given: Any) -> tuple[Tensor, tuple, LinearState | None]:
        """What stands behind a layer, its rows and its end state; `given` is for the mixer."""
        y, rows, state = self._mixer(index, self._norm(x, f"layers.{index}.input_layernorm"), *given)
        x = x + y
        return x + self._mlp(index, self._norm(x, f"layers.{index}.post_attention_layernorm")), rows, state

    def _mixer(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple, LinearState | None]:
        """A layer's attention or linear layer: its output, rows and end state."""
        if self.layer_types[index] == LINEAR:
            return self._delta_net(index, x, stream, fault, compose_T)
        return *self._attention(index, x, stream, fault), None

    def _attention(self, index: int, x: Tensor, stream: Stream, fault: str | None) -> tuple[Tensor, tuple]:
        """A full-attention layer of a stream: one softmax over visible public rows and the stream's own past.

        Returns the layer's output `[n, hidden]` and its unrotated `(k, v)`.
        """
        name, n, dim = f"layers.{index}.self_attn", x.shape[0], self.config["head_dim"]
        q = self._linear(x, f"{name}.q_proj").view(n, self.config["num_attention_heads"], -1)
        gate = None
        if self.is_qwen35:
            q, gate = q[..., :dim], q[..., dim:]
        k = self._linear(x, f"{name}.k_proj").view(n, -1, dim)
        v = self._linear(x, f"{name}.v_proj").view(n, -1, dim)
        if f"{name}.q_norm.weight" in self._weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        window = self.config["sliding_window"] if self.layer_types[index] == "sliding_attention" else None

        row = torch.arange(n)
        own = row if fault == "stream_positions" else torch.tensor(stream.positions)
        keys, values = [rotate(k, own, self.inv_freq)], [v]
        visible = [row[:, None] >= row[None, :]]
        if window is not None:
            at = row if fault == "stream_windows" else own
            visible[0] &= at[:, None] - at[None, :] < window
        for public in self._public(index, stream, fault):
            position = public.position + (public.offset if fault == "rotated_twice" else 0)
            keys.append(rotate(public.k, position, self.inv_freq))
            values.append(public.v)
            visible.append((row >= public.first_row)[:, None].expand(n, len(position)))
            if window is not None and fault != "public_without_windows":
                visible[-1] = visible[-1] & (own[:, None] - position[None, :] < window)
        q = rotate(q, own, self.inv_freq)
        y = self._attend(q, keys, values, visible, fault)
        if gate is not None:
            y = y * gate.sigmoid()
        return self._linear(y.reshape(n, -1), f"{name}.o_proj"), (k, v)

    def _public(self, index: int, stream: Stream, fault: str | None) -> Iterator[Public]:
        """What a stream reads of records in a full-attention layer."""
        for compose in stream.composes if fault != "no_public_kv" else ():
            record = self._record(compose.tokens, compose.lo, compose.hi)[index]
            for part in compose.shown:
                offset = torch.arange(part.lo, part.hi)
                position = offset + (0 if fault == "wrong_rotation" else compose.start)
                first_row = part.at - (compose.lo if fault == "early_visibility" else 0)
                rows = offset - compose.lo
                yield Public(record.k[rows], record.v[rows], offset, position, first_row)

    def _attend(self, q, keys: list[Tensor], values: list[Tensor], visible, fault) -> Tensor:
        """One softmax over the stream's own columns, which stand first, and those of records."""
        joined = (torch.cat(keys), torch.cat(values), torch.cat(visible, 1))
        return attend(q, *joined, lambda products: products / q.shape[-1] ** 0.5)

    def _delta_net(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple, LinearState]:
        """A gated delta net layer of a stream: scan up to each compose point, compose, go on.

        Returns the output `[n, hidden]`, the rows `(pre-conv [n, C], DeltaInputs)` and the end state.
        """
        cfg, w, name = self.config, self._weights, f"layers.{index}.linear_attn"
        hv, dk, dv = cfg["linear_num_value_heads"], cfg["linear_key_head_dim"], cfg["linear_value_head_dim"]
        n, width = x.shape[0], cfg["linear_conv_kernel_dim"]
        mixed = self._linear(x, f"{name}.in_proj_qkv")
        z = self._linear(x, f"{name}.in_proj_z").view(n, hv, dv)
        beta = self._linear(x, f"{name}.in_proj_b").sigmoid()
        g = self._log_decays(name, self._linear(x, f"{name}.in_proj_a"))
        kernel = w[f"{name}.conv1d.weight"].squeeze(1)

        state = LinearState(x.new_zeros(hv, dk, dv), x.new_zeros(width - 1, mixed.shape[1]))
        inputs, outputs = [], []

        def run(state: LinearState, begin: int, end: int) -> LinearState:
            qkv = causal_conv(mixed[begin:end], state.conv, kernel)
            rows = self._delta_inputs(qkv, g[begin:end], beta[begin:end])
            out, S = scan(rows, state.S)
            inputs.append(rows)
            outputs.append(out)
            return LinearState(S, last_rows(torch.cat((state.conv, mixed[begin:end])), width - 1))

        state = self._walk(index, stream, state, run, fault, compose_T)
        y = rms_norm(torch.cat(outputs), w[f"{name}.norm.weight"], self.eps) * self._opening(z)
        kept = (mixed, DeltaInputs.cat(inputs))
        return self._linear(y.reshape(n, -1), f"{name}.out_proj"), kept, state

    def _walk(
        self,
        index: int,
        stream: Stream,
        state: LinearState,
        run: Callable[[LinearState, int, int], LinearState],
        fault: str | None,
        compose_T: bool,
    ) -> LinearState:
        """A linear layer's end state: `run` moves a state on over stream tokens `[begin, end)`, and compose
        points apply records."""
        begin = 0
        for piece in stream.pieces():
            after = run(state, begin, piece.end)
            aside = piece.island and fault != "island_in_states"
            state = LinearState(state.S if aside else after.S, after.conv)
            begin = piece.end
            if piece.compose is not None:
                state = self._compose(state, index, piece.compose, fault, compose_T)
        return state

    def _log_decays(self, name: str, a: Tensor) -> Tensor:
        """`g [n, HV]` of gates `a [n, HV]`."""
        dt = F.softplus(a + self._weights[f"{name}.dt_bias"])
        return -self._weights[f"{name}.A_log"].exp() * dt

    def _opening(self, z: Tensor) -> Tensor:
        """What a linear layer's normalised outputs are multiplied by."""
        return F.silu(z)

    def _delta_inputs(self, qkv: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
        """Split convolved rows `[n, C]` into heads: q and k normalised, q scaled, key heads repeated."""
        cfg, n = self.config, qkv.shape[0]
        hk, hv = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
        dk, dv = cfg["linear_key_head_dim"], cfg["linear_value_head_dim"]
        q, k, v = qkv.split((hk * dk, hk * dk, hv * dv), dim=-1)
        q, k = (l2_norm(y.view(n, hk, dk)).repeat_interleave(hv // hk, 1) for y in (q, k))
        return DeltaInputs(q / dk**0.5, k, v.view(n, hv, dv), g, self.largest_beta * beta)

    def _compose(
        self, state: LinearState, index: int, compose: Compose, fault: str | None, compose_T: bool
    ) -> LinearState:
        """`S <- T S + S_C`; the conv context becomes the record's."""
        lo = 0 if fault == "state_over_head" else compose.lo
        record = self._record(compose.tokens, lo, compose.hi)[index]
        carried = self._carried(record.T, state.S)
        if fault == "no_T" or not compose_T:
            carried = state.S
        elif fault == "forget_left":
            carried = torch.zeros_like(state.S)
        elif fault == "T_transposed":
            carried = self._carried(record.T.mT, state.S)
        return LinearState(carried + record.S, state.conv if fault == "no_conv_tail" else record.conv)

    def _carried(self, T: Tensor, S: Tensor) -> Tensor:
        """A state behind a transition."""
        return T @ S

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        """The MLP of a layer."""
        return self._gated(x, f"layers.{index}.mlp")

    def _gated(self, x: Tensor, name: str) -> Tensor:
        """A gated MLP."""
        inner = F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(inner, f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """A layer's RMSNorm in the checkpoint's convention."""
        weight = self._weights[f"{name}.weight"]
        return rms_norm(x, 1 + weight if self.is_qwen35 else weight, self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """A projection, with its bias if the checkpoint has one."""
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _logprobs(self, hidden: Tensor) -> Tensor:
        """`log_softmax` of the logits; the output matrix is the embedding where the checkpoint ties them."""
        tied = self.config.get("tie_word_embeddings", False)
        matrix = self._weights["embed_tokens.weight" if tied else "lm_head.weight"]
        return (hidden @ matrix.T).log_softmax(-1)

    # ---- the checkpoint ------------------------------------------------------------------------------------

    @staticmethod
    def _understood(config: dict) -> dict:
        """The configuration under the names that are asked for here."""
        return config

    def _inverse_frequencies(self) -> Tensor:
        """`theta^(-2i/d)` over the rotated part of the head (a quarter of it in Qwen3.5), if there is one."""
        if not self.config.get("rotates", True):
            return torch.zeros(0, dtype=torch.float64)
        rope = self.config["rope_parameters"]
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"the oracle knows default RoPE only, not {rope['rope_type']!r}")
        partial = rope.get("partial_rotary_factor", 0.25 if self.is_qwen35 else 1.0)
        dim = int(self.config["head_dim"] * partial)
        return rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def _load(self, path: Path) -> dict[str, Tensor]:
        """All weights in `dtype`, under their names without the prefixes of the whole model."""
        weights: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                for prefix in ("model.", "language_model.", "backbone."):
                    name = name.removeprefix(prefix)
                parts = name.split(".")
                weights[".".join(self.names.get(part, part) for part in parts)] = tensor.to(self.dtype)
        if not weights:
            raise FileNotFoundError(f"no safetensors file in {path}")
        return weights
