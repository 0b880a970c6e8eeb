"""The oracles of Ring and Ling 2.5 and of Ring-linear 2.0: lightning attention, and latent or grouped-query
attention with rotation.

Lightning attention (arXiv:2401.04658) is linear attention with a constant decay a head,

    S_i = lambda_h S_{i-1} + k_i v_i^T        o_i = S_i^T q_i / sqrt(d)

    lambda_h = e^{-s_h (1 - l / (L - 1) + 1e-5)}      s_h = 2^{-8 h / H},  h = 1 ... H

in layer l of L, for H a power of two. q and k are normalised by heads and rotated (half-split layout) in
their first channels, where YaRN is on by its tables; outputs are normalised in groups of channels and
multiplied by the sigmoid of a gate.

What a segment leaves in such a layer are its keys, not rotated, and values: composed, each key is rotated at
its position in the prompt and written with the decays of the tokens behind it.

Grouped-query attention has q and k normalised and rotated alike. Experts are DeepSeek-V3's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import ATTENTION_FAULTS, LATENT_FAULTS, RELOCATION_FAULTS, SEAM_FAULTS, STATE_FAULTS
from .mla import MLAOracle, shares_by_groups
from .oracle import AttentionRecord, LinearState, Oracle, rms_norm, rotate
from .stream import Compose, Stream

NAMES = {
    "word_embeddings": "embed_tokens",
    ".attention.": ".self_attn.",
    ".self_attn.dense": ".self_attn.o_proj",
}
"""Parts of the checkpoint's names, as they are called here."""


@dataclass(frozen=True)
class KeyRecord:
    """What an interior leaves in one linear layer: unrotated `k` and `v`, `[rows, H, D]`."""

    k: Tensor
    v: Tensor


class BailingOracle(MLAOracle):
    """Position-independent caching of such a checkpoint, by definition."""

    model_types = ("bailing_hybrid",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        for name in list(self._weights):
            ours = name
            for part, called in NAMES.items():
                ours = ours.replace(part, called)
            self._weights[ours] = self._weights.pop(name)
        self.rotated = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        self.linear_inv_freq = self._frequencies(self.rotated)

    def faults(self) -> list[str]:
        unseen = ("T_transposed", "no_conv_tail")
        states = [fault for fault in STATE_FAULTS if fault not in unseen]
        return [*SEAM_FAULTS, *states, *ATTENTION_FAULTS, *LATENT_FAULTS, *RELOCATION_FAULTS]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        group = config["layer_group_size"]
        linear = [bool((i + 1) % group) for i in range(config["num_hidden_layers"])]
        return config | {
            "layer_types": ["linear_attention" if it else "full_attention" for it in linear],
            "rope_parameters": {
                "rope_theta": config["rope_theta"],
                **(config["rope_scaling"] or {"rope_type": "default"}),
            },
        }

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[KeyRecord | AttentionRecord]:
        kinds = zip(self.layer_types, self._isolated(tokens), strict=True)
        made = {"linear_attention": KeyRecord, "full_attention": AttentionRecord}
        return [made[kind](first[lo:hi], second[lo:hi]) for kind, (first, second) in kinds]

    def _decay(self, index: int) -> Tensor:
        """`[H, 1, 1]`"""
        heads, layers = self.config["num_attention_heads"], self.config["num_hidden_layers"]
        slope = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        return (-slope * (1 - index / (layers - 1) + 1e-5)).exp()[:, None, None].to(self.dtype)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        turned, rest = rotate(x, positions, self.linear_inv_freq).split(
            [self.rotated, x.shape[-1] - self.rotated], -1
        )
        return torch.cat([self.table_length * turned, rest], -1)

    def _delta_net(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor], LinearState]:
        """A linear layer of a stream: scan up to each compose point, compose, go on.

        Returns the output `[n, hidden]`, the rows' unrotated k and v, and the end state.
        """
        w, name, n = self._weights, f"layers.{index}.self_attn", x.shape[0]
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        qkv = self._linear(x, f"{name}.query_key_value")
        qkv = F.silu(qkv) if self.config["linear_silu"] else qkv
        q, k, v = (part.view(n, heads, size) for part in qkv.chunk(3, -1))
        q, k = self._norm(q, f"{name}.query_layernorm"), self._norm(k, f"{name}.key_layernorm")
        own = torch.arange(n) if fault == "stream_positions" else torch.tensor(stream.positions)
        queries, keys = self._turned(q, own) / size**0.5, self._turned(k, own)

        decay, S, begin, outputs = self._decay(index), x.new_zeros(heads, size, size), 0, []
        for piece in stream.pieces():
            before = S
            for t in range(begin, piece.end):
                S = decay * S + keys[t][:, :, None] * v[t][:, None]
                outputs.append(torch.einsum("hk,hkv->hv", queries[t], S))
            if piece.island and fault != "island_in_states":
                S = before
            begin = piece.end
            if piece.compose is not None:
                S = self._composed(S, index, piece.compose, fault, compose_T)
        groups = self.config["group_norm_size"]
        y = torch.stack(outputs).view(n, groups, -1) if outputs else x.new_zeros(0, groups, size)
        y = rms_norm(y, torch.ones(()).to(y), self.eps).view(n, -1) * w[f"{name}.g_norm.weight"]
        y = y * self._linear(x, f"{name}.g_proj").sigmoid()
        return self._linear(y, f"{name}.o_proj"), (k, v), LinearState(S, x.new_zeros(0))

    def _composed(
        self, S: Tensor, index: int, compose: Compose, fault: str | None, compose_T: bool
    ) -> Tensor:
        """The interior's tokens written, each at its position; without `compose_T` what was there stays."""
        lo = 0 if fault == "state_over_head" else compose.lo
        record = self._record(compose.tokens, lo, compose.hi)[index]
        rows, decay = torch.arange(lo, compose.hi), self._decay(index)
        at = rows + (0 if fault == "states_not_moved" else compose.start)
        behind = decay[None] ** (compose.hi - 1 - rows).to(S)[:, None, None, None]
        keys = self._turned(record.k, at)
        added = (behind * keys[..., None] * record.v[:, :, None]).sum(0)
        if fault == "forget_left":
            return added
        return added + (S if fault == "no_T" or not compose_T else decay ** len(rows) * S)

    def _shares(self, logits: Tensor, name: str) -> Tensor:
        return shares_by_groups(logits, self._weights[f"{name}.gate.expert_bias"], self.config)


class RingLinearOracle(BailingOracle):
    """Position-independent caching of a checkpoint of Ring-linear 2.0, by definition."""

    model_types = ("bailing_moe_linear",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        rows = [self.config["head_dim"] * number for number in (heads, kv_heads, kv_heads)]
        for index, kind in enumerate(self.layer_types):
            if kind != "full_attention":
                continue
            name = f"layers.{index}.self_attn"
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
