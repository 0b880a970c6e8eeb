"""The FLOPs that a cached segment saves: an estimate of a prefill, from a model's sizes.

Eviction compares segments of one model, so that a factor common to all segments does no harm.  The relative
growth of attention's quadratic part matters.  The estimate counts products with weights (``2 m n`` for ``[1,
m]`` with ``[m, n]``) and attention's causal pairs.  A linear layer of any kind counts as five products of the
hidden size (q, k, v, a gate and the output).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlopModel:
    """The FLOPs of a model.  ``per_token``: the products of one token with all weights.  ``per_pair``: one
    query with one key, in all attention layers."""

    per_token: float
    per_pair: float

    def prefill(self, tokens: int) -> float:
        """Return the FLOPs of a prefill of ``tokens`` tokens from position 0."""
        return tokens * self.per_token + self.per_pair * tokens * (tokens + 1) / 2

    @classmethod
    def from_hf_config(cls, text_config: object, attention_layers: int, linear_layers: int) -> FlopModel:
        """Return the model of a transformers text configuration.

        A missing hidden size counts as 4096, missing heads as ``hidden / 128``, a missing head size as
        ``hidden / heads``.  K and V have all heads by default, and an MLP has the width ``4 x hidden``.
        """

        def number(default: int, *names: str) -> int:
            return _number(text_config, default, *names)

        hidden = number(4096, "hidden_size", "d_model", "n_embd")
        heads = number(max(1, hidden // 128), "num_attention_heads", "n_head")
        size = number(max(1, hidden // heads), "head_dim", "attention_head_dim")
        kv_heads = number(heads, "num_key_value_heads")
        key, value = size, size
        if number(0, "kv_lora_rank"):  # latent attention: its products to K and V are small
            kv_heads = 0
            key = number(128, "qk_nope_head_dim") + number(0, "qk_rope_head_dim")
            value = number(128, "v_head_dim")
        layers = attention_layers + linear_layers
        weights = (
            attention_layers * hidden * (heads + kv_heads) * (key + value)
            + linear_layers * 5 * hidden * hidden
            + layers * 3 * hidden * _intermediate(text_config, hidden)
        )
        return cls(2.0 * weights, 2.0 * attention_layers * heads * (key + value))


def _intermediate(config: object, hidden: int) -> int:
    """Return the width of the MLP; for a mixture of experts, the summed width of a token's experts."""
    active = _number(config, 0, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    each = _number(config, 0, "moe_intermediate_size")
    if not (active and each):
        return _number(config, 4 * hidden, "intermediate_size")
    shared = _number(config, 0, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    return active * each + (shared or each * _number(config, 0, "num_shared_experts"))


def _number(config: object, default: int, *names: str) -> int:
    """Return the first attribute that is a positive integer, equal in all layers; else ``default``."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers raises where layers differ: no number holds for all
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default
