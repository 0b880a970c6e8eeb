"""The oracle of Gemma 2: every score is soft-capped, `c tanh(x / c)`, and so are logits.

Beside that: norms before and after each branch, offset from 1; embeddings times the root of their size; gated
GELU; scores divided by the root of `query_pre_attn_scalar`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS, SOFT_CAP_FAULTS
from .oracle import LinearState, Oracle, attend, rms_norm
from .stream import Stream


class Gemma2Oracle(Oracle):
    """Position-independent caching of a Gemma 2 checkpoint, by definition."""

    model_types = ("gemma2",)

    def faults(self) -> list[str]:
        return [*SEAM_FAULTS, *ATTENTION_FAULTS, *SOFT_CAP_FAULTS]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        # The activation is not silu: see `_mlp`.
        return config | {"hidden_act": "silu", "tie_word_embeddings": config.get("tie_word_embeddings", True)}

    def _embedded(self, stream: Stream) -> Tensor:
        return super()._embedded(stream) * self.config["hidden_size"] ** 0.5

    def _layer(self, index: int, x: Tensor, *given: Any) -> tuple[Tensor, tuple, LinearState | None]:
        layer = f"layers.{index}"
        y, *kept = self._mixer(index, self._norm(x, f"{layer}.input_layernorm"), *given)
        x = x + self._norm(y, f"{layer}.post_attention_layernorm")
        y = self._mlp(index, self._norm(x, f"{layer}.pre_feedforward_layernorm"))
        return x + self._norm(y, f"{layer}.post_feedforward_layernorm"), *kept

    def _attend(
        self, q: Tensor, keys: list[Tensor], values: list[Tensor], visible: list[Tensor], fault: str | None
    ) -> Tensor:
        own, cap = len(keys[0]), self.config["attn_logit_softcapping"]
        scale = self.config["query_pre_attn_scalar"] ** -0.5

        def scores(products: Tensor) -> Tensor:
            free = products * scale
            capped = cap * torch.tanh(free / cap)
            if fault == "private_without_cap":
                capped[..., :own] = free[..., :own]
            elif fault == "public_without_cap":
                capped[..., own:] = free[..., own:]
            return capped

        return attend(q, torch.cat(keys), torch.cat(values), torch.cat(visible, 1), scores)

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        name = f"layers.{index}.mlp"
        inner = F.gelu(self._linear(x, f"{name}.gate_proj"), approximate="tanh")
        return self._linear(inner * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + self._weights[f"{name}.weight"], self.eps)

    def _logprobs(self, hidden: Tensor) -> Tensor:
        tied, cap = self.config["tie_word_embeddings"], self.config["final_logit_softcapping"]
        logits = hidden @ self._weights["embed_tokens.weight" if tied else "lm_head.weight"].T
        return (cap * torch.tanh(logits / cap)).log_softmax(-1)
