"""The layer operators in C++ (`csrc/mamba2.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension
from .arguments import Caches, Carry, Inputs, Records, Weights

HEAD_MULTIPLE = 16
TAPS = range(2, 5)
INPUTS = (torch.bfloat16, torch.float32)
STATES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(weights: Weights, caches: Caches) -> str | None:
    """Why the C++ operators do not serve such a layer, or `None`: they do."""
    P, N = caches.state.shape[2:]
    if caches.state.device.type != "cpu":
        return f"{caches.state.device.type} tensors"
    if caches.state.dtype not in STATES:
        return f"states in {caches.state.dtype}"
    if caches.conv.dtype not in INPUTS:
        return f"inputs in {caches.conv.dtype}"
    if P % HEAD_MULTIPLE or N % HEAD_MULTIPLE:
        return f"head sizes {P} and {N}, not multiples of {HEAD_MULTIPLE}"
    if len(weights.weight) not in TAPS:
        return f"a convolution of width {len(weights.weight)}"
    return extension.missing()


def mamba2_segments(
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
    rows: Tensor,
    carries: Sequence[Carry],
) -> None:
    """See the package."""
    torch.ops.vllm_hypic.mamba2_segments(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.log_transition,
        rows,
        [c.log_transition for c in carries],
        [c.state for c in carries],
    )


def mamba2_compose(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor, ops: Tensor
) -> None:
    """See the package."""
    torch.ops.vllm_hypic.mamba2_compose(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.log_transition,
        rows,
        ops,
    )


def _layer(x: Inputs, w: Weights, caches: Caches, out: Tensor) -> tuple[object, ...]:
    constants = w.weight, w.bias, w.rate, w.dt_bias, w.D, w.groups
    return x.mixed, x.dt, *constants, caches.slots, caches.conv, caches.state, out


def register_fakes() -> None:
    """Both return nothing: for tracing, their schemas say what they change."""

    @torch.library.register_fake("vllm_hypic::mamba2_segments")
    def _(*args: object) -> None:
        return None

    @torch.library.register_fake("vllm_hypic::mamba2_compose")
    def _(*args: object) -> None:
        return None


if extension.missing() is None:
    register_fakes()
