"""The oracle of models with gated short convolutions (LFM2), by their formula:

    (B, C, h) = W_in u        x_t = B_t * h_t        y_t = W_out (C_t * sum_j w_j x_{t - k + 1 + j})

The state is the last k - 1 rows of x, and a record is these rows of its interior.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS
from .oracle import (
    AttentionRecord,
    LinearRecord,
    LinearState,
    Oracle,
    last_rows,
)
from .stream import Stream

NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Of weights, as Qwen3 calls them."""


class ShortConvOracle(Oracle):
    """Position-independent caching of an LFM2 checkpoint, by definition."""

    model_types = ("lfm2",)

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64):
        super().__init__(model_dir, dtype)
        self._weights = {self._renamed(name): weight for name, weight in self._weights.items()}

    def faults(self) -> list[str]:
        return [*SEAM_FAULTS, *ATTENTION_FAULTS, "no_conv_tail"]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        types = ["linear_attention" if kind == "conv" else kind for kind in config["layer_types"]]
        size = config["hidden_size"] // config["num_attention_heads"]
        known = {
            "layer_types": types,
            "head_dim": size,
            "hidden_act": "silu",
            "rms_norm_eps": config["norm_eps"],
        }
        return config | known

    @staticmethod
    def _renamed(name: str) -> str:
        for theirs, ours in NAMES.items():
            name = name.replace(f"{theirs}.", f"{ours}.")
        return name

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[LinearRecord | AttentionRecord]:
        key = (tokens, lo, hi)
        if key not in self._records:
            layers: list[LinearRecord | AttentionRecord] = []
            for kind, (first, second) in zip(self.layer_types, self._isolated(tokens), strict=True):
                if kind == "linear_attention":
                    nothing = first.new_zeros(0)
                    layers.append(LinearRecord(nothing, nothing, last_rows(first[lo:hi], second)))
                else:
                    layers.append(AttentionRecord(first[lo:hi], second[lo:hi]))
            self._records[key] = layers
        return self._records[key]

    def _delta_net(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple, LinearState]:
        """The other linear layer. Returns its output, `(x, k - 1)` of all rows and the end state."""
        name = f"layers.{index}.conv"
        B, C, h = self._linear(x, f"{name}.in_proj").chunk(3, -1)
        kernel, rows = self._weights[f"{name}.conv.weight"].squeeze(1), B * h
        reach = kernel.shape[1] - 1
        context, outputs, begin = rows.new_zeros(reach, rows.shape[1]), [], 0
        for compose in (*stream.composes, None):
            end = len(rows) if compose is None else compose.at
            seen = torch.cat((context, rows[begin:end]))
            outputs.append(sum(seen[j : j + end - begin] * kernel[:, j] for j in range(reach + 1)))
            context, begin = last_rows(seen, reach), end
            if compose is not None and fault != "no_conv_tail":
                context = self._record(compose.tokens, compose.lo, compose.hi)[index].conv
        y = self._linear(C * torch.cat(outputs), f"{name}.out_proj")
        return y, (rows, reach), LinearState(rows.new_zeros(0), context)
