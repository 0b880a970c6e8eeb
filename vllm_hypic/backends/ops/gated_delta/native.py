"""The layer operators in C++ (`csrc/gated_delta.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension
from .arguments import DEAD_BELOW, Caches, Carry, Inputs, Records, Weights

HEAD_MULTIPLE = 16
TAPS = range(2, 5)
DTYPES = (torch.bfloat16, torch.float32)


def refuses(weights: Weights, caches: Caches) -> str | None:
    """Why the C++ operators do not serve such a layer, or `None`: they do."""
    K, V = caches.state.shape[2:]
    if caches.state.device.type != "cpu":
        return f"{caches.state.device.type} tensors"
    if caches.state.dtype != torch.float32:
        return f"states in {caches.state.dtype}"
    if caches.conv.dtype not in DTYPES:
        return f"inputs in {caches.conv.dtype}"
    if K % HEAD_MULTIPLE or V % HEAD_MULTIPLE:
        return f"head sizes {K} and {V}, not multiples of {HEAD_MULTIPLE}"
    if len(weights.weight) not in TAPS:
        return f"a convolution of width {len(weights.weight)}"
    return extension.missing()


def gdn_segments(
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
    rows: Tensor,
    carries: Sequence[Carry],
    dead_below: float = DEAD_BELOW,
) -> None:
    """See the package."""
    torch.ops.vllm_hypic.gdn_segments(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.transitions,
        records.block_of,
        rows,
        [c.transition for c in carries],
        [c.head for c in carries],
        [c.alive for c in carries],
        dead_below,
    )


def gdn_compose(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor, ops: Tensor
) -> None:
    """See the package."""
    torch.ops.vllm_hypic.gdn_compose(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.transitions,
        records.block_of,
        rows,
        ops,
    )


def _layer(x: Inputs, w: Weights, caches: Caches, out: Tensor) -> tuple[object, ...]:
    gates = x.a, x.b, w.weight, w.bias, w.rate, w.dt_bias, w.key_heads, w.eps
    return x.mixed, *gates, caches.slots, caches.conv, caches.state, out


def register_fakes() -> None:
    """Both return nothing: for tracing, their schemas say what they change."""

    @torch.library.register_fake("vllm_hypic::gdn_segments")
    def _(*args: object) -> None:
        return None

    @torch.library.register_fake("vllm_hypic::gdn_compose")
    def _(*args: object) -> None:
        return None


if extension.missing() is None:
    register_fakes()
