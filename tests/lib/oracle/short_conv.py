"""The oracle of models with gated short convolutions (LFM2), by their formula:

    (B, C, h) = W_in u        x_t = B_t * h_t        y_t = W_out (C_t * sum_j w_j x_{t - k + 1 + j})

The state is the last k - 1 rows of x, and a record is these rows of its interior.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from .faults import ATTENTION_FAULTS, SEAM_FAULTS
from .oracle import LinearRecord, LinearState, Oracle, last_rows
from .stream import Stream


class ShortConvOracle(Oracle):
    """Position-independent caching of an LFM2 checkpoint, by definition."""

    model_types = ("lfm2",)
    names: ClassVar[dict[str, str]] = {
        "embedding_norm": "norm",
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "out_proj": "o_proj",
        "feed_forward": "mlp",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }

    def faults(self) -> list[str]:
        return [*SEAM_FAULTS, *ATTENTION_FAULTS, "no_conv_tail"]

    @staticmethod
    def _understood(config: dict[str, Any]) -> dict[str, Any]:
        types = ["linear_attention" if kind == "conv" else kind for kind in config["layer_types"]]
        return config | {
            "layer_types": types,
            "head_dim": config["hidden_size"] // config["num_attention_heads"],
            "hidden_act": "silu",
            "rms_norm_eps": config["norm_eps"],
        }

    def _summary(self, rows: Tensor, reach: int, lo: int, hi: int) -> LinearRecord:
        nothing = rows.new_zeros(0)
        return LinearRecord(nothing, nothing, last_rows(rows[lo:hi], reach))

    def _carried(self, T: Tensor, S: Tensor) -> Tensor:
        return S

    def _delta_net(
        self, index: int, x: Tensor, stream: Stream, fault: str | None, compose_T: bool
    ) -> tuple[Tensor, tuple, LinearState]:
        """The other linear layer. Returns its output, `(x, k - 1)` of all rows and the end state."""
        name = f"layers.{index}.conv"
        B, C, h = self._linear(x, f"{name}.in_proj").chunk(3, -1)
        kernel, rows = self._weights[f"{name}.conv.weight"].squeeze(1), B * h
        reach = kernel.shape[1] - 1
        nothing, outputs = rows.new_zeros(0), []

        def run(state: LinearState, begin: int, end: int) -> LinearState:
            seen = torch.cat((state.conv, rows[begin:end]))
            outputs.append(sum(seen[j : j + end - begin] * kernel[:, j] for j in range(reach + 1)))
            return LinearState(nothing, last_rows(seen, reach))

        state = LinearState(nothing, rows.new_zeros(reach, rows.shape[1]))
        state = self._walk(index, stream, state, run, fault, compose_T)
        y = self._linear(C * torch.cat(outputs), f"{name}.o_proj")
        return y, (rows, reach), state
