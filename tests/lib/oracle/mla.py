"""The oracle of multi-head latent attention, in the form in which the papers define it.

DeepSeek-V2 (arXiv:2405.04434), section 2.1: a token's hidden state `x` leaves a latent `c = norm(W_DKV x)`,
which has no position, and one key `k_R = RoPE(W_KR x)` that all heads share. Every head projects it up,

    K_h = [W_UK_h c | k_R]      V_h = W_UV_h c      Q_h = [q_C | RoPE(q_R)]

and attends over these by `softmax(Q K^T / sqrt(d_C + d_R)) V`. Rotation turns neighbouring pairs. What a
record keeps is `c` and `k_R` before its rotation.

YaRN (arXiv:2309.00071), as DeepSeek has it: frequencies are interpolated below a ramp, tables multiplied by
`m(mscale) / m(mscale_all_dim)`, scores by `m(mscale_all_dim)^2`, `m(a) = 0.1 a ln(factor) + 1`.

Experts are DeepSeek-V2's: a softmax over all, the best few by their own weights, times a factor, beside
shared ones.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .faults import LATENT_FAULTS
from .oracle import Oracle, attend
from .stream import Stream

BAILING_NAMES = {"word_embeddings": "embed_tokens", "attention": "self_attn", "dense": "o_proj"}
"""What parts of weights' names are called here, in checkpoints of Bailing."""


def rotate_pairs(x: Tensor, positions: Tensor, inv_freq: Tensor, length: float = 1.0) -> Tensor:
    """Rotation of neighbouring pairs, times `length`: `x [n, H, 2 * len(inv_freq)]`, `positions [n]`."""
    turn = torch.polar(torch.full((), length, dtype=x.dtype), positions.to(inv_freq)[:, None] * inv_freq)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], len(inv_freq), 2))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def _shares_by_groups(logits: Tensor, correction: Tensor, config: Mapping[str, Any]) -> Tensor:
    """DeepSeek-V3's (arXiv:2412.19437): what experts count for, `[n, experts]`.

    Chosen by their sigmoids plus a correction, in the groups whose two best are best; weighted by the
    sigmoids alone, made to add up to 1 and multiplied by a factor.
    """
    scores = logits.sigmoid()
    groups = (scores + correction).view(len(scores), config["n_group"], -1)
    good = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    closed = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, good, False)
    chosen = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    chosen = chosen.topk(config["num_experts_per_tok"], -1).indices
    best = scores * torch.zeros_like(scores).scatter(1, chosen, 1)
    return best / best.sum(-1, keepdim=True) * config["routed_scaling_factor"]


class MLAOracle(Oracle):
    """Position-independent caching of a DeepSeek-V2 checkpoint, by definition."""

    model_types = ("deepseek_v2",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        rope = self.config["rope_parameters"]
        factor = rope.get("factor", 1.0)
        self.score_length = _yarn_length(factor, rope.get("mscale_all_dim", 0.0)) ** 2
        self.table_length = _yarn_length(factor, rope.get("mscale", 1.0)) / self.score_length**0.5

    def faults(self) -> list[str]:
        return [*super().faults(), *LATENT_FAULTS]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        return config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}

    def _inverse_frequencies(self) -> Tensor:
        return self._frequencies(self.config["qk_rope_head_dim"])

    def _frequencies(self, dim: int) -> Tensor:
        """Of `dim` channels, or YaRN's: those that turn more than `beta_fast` times in the original context
        stay, those that turn less than `beta_slow` times are divided by `factor`, a ramp over indices joins
        the two."""
        rope = self.config["rope_parameters"]
        base = rope["rope_theta"]
        own = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if rope["rope_type"] == "default":
            return own

        def index(turns: float) -> float:
            original = rope["original_max_position_embeddings"]
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(index(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(index(rope.get("beta_slow", 1))), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return own * (1 - ramp) + own / rope["factor"] * ramp

    def _attention(self, index: int, x: Tensor, stream: Stream, fault: str | None) -> tuple[Tensor, tuple]:
        """An MLA layer of a stream; returns its output `[n, hidden]` and `(unrotated k_R, c)`."""
        cfg, name, n = self.config, f"layers.{index}.self_attn", x.shape[0]
        rank, rope, heads = cfg["kv_lora_rank"], cfg["qk_rope_head_dim"], cfg["num_attention_heads"]
        if cfg["q_lora_rank"] is None:
            q = self._linear(x, f"{name}.q_proj")
        else:
            compressed = self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
            q = self._linear(compressed, f"{name}.q_b_proj")
        q_content, q_rotary = q.view(n, heads, -1).split((cfg["qk_nope_head_dim"], rope), -1)
        latent, key = self._linear(x, f"{name}.kv_a_proj_with_mqa").split((rank, rope), -1)
        latent, key = self._norm(latent, f"{name}.kv_a_layernorm"), key[:, None]

        row = torch.arange(n)
        own = row if fault == "stream_positions" else torch.tensor(stream.positions)
        keys, latents, visible = [self._rotated(key, own)], [latent], [row[:, None] >= row[None, :]]
        for public in self._public(index, stream, fault):
            raw = self._rotated(public.k, public.offset) if fault == "rotated_twice" else public.k
            keys.append(raw if fault == "not_rotated" else self._rotated(raw, public.position))
            latents.append(public.v)
            visible.append((row >= public.first_row)[:, None].expand(n, len(public.offset)))

        up = self._linear(torch.cat(latents), f"{name}.kv_b_proj").view(
            -1, heads, q_content.shape[-1] + cfg["v_head_dim"]
        )
        k_content, v = up.split((q_content.shape[-1], cfg["v_head_dim"]), -1)
        k = torch.cat((k_content, torch.cat(keys).expand(-1, heads, -1)), -1)
        q = torch.cat((q_content, self._rotated(q_rotary, own)), -1)
        scale = self.score_length / q.shape[-1] ** 0.5
        y = attend(q, k, v, torch.cat(visible, 1), lambda products: products * scale)
        return self._linear(self._opened(x, y, name).reshape(n, -1), f"{name}.o_proj"), (key, latent)

    def _opened(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """Outputs of heads `y [n, H, D]` behind their gate; there is none."""
        return y

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_pairs(x, positions, self.inv_freq, self.table_length)

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        """The MLP of a layer, or its experts."""
        name = f"layers.{index}.mlp"
        if f"{name}.gate.weight" not in self._weights:
            return super()._mlp(index, x)
        weights = self._shares(self._linear(x, f"{name}.gate"), name)
        experts = [self._gated(x, f"{name}.experts.{e}") for e in range(weights.shape[-1])]
        mixture = torch.einsum("ne,end->nd", weights, torch.stack(experts))
        return self._gated(x, f"{name}.shared_experts") + mixture

    def _shares(self, logits: Tensor, name: str) -> Tensor:
        """What experts count for, `[n, experts]`, most of them for nothing."""
        if (correction := self._weights.get(f"{name}.gate.expert_bias")) is not None:
            return _shares_by_groups(logits, correction, self.config)
        scores = logits.softmax(-1)
        best, chosen = scores.topk(self.config["num_experts_per_tok"], -1)
        if self.config["norm_topk_prob"]:
            best = best / best.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, best * self.config["routed_scaling_factor"])


def _yarn_length(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
