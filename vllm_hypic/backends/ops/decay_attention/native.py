"""The layer operators in C++ (`csrc/decay_attention.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension, native_layer
from .arguments import Caches, Carry, Inputs, Records, Relocation

STATES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(inputs: torch.dtype, state: Tensor) -> str | None:
    """Why the C++ operators do not serve a layer with inputs of this dtype and vLLM's `state` [slots, H, K,
    V], or `None`: they do."""
    K, V = state.shape[2:]
    if state.device.type != "cpu":
        return f"{state.device.type} tensors"
    if state.dtype not in STATES:
        return f"states in {state.dtype}"
    if inputs not in native_layer.INPUTS:
        return f"inputs in {inputs}"
    if K % native_layer.HEAD_MULTIPLE or V % native_layer.HEAD_MULTIPLE:
        return f"head sizes {K} and {V}, not multiples of {native_layer.HEAD_MULTIPLE}"
    return extension.missing()


def decay_attention_segments(
    x: Inputs, caches: Caches, out: Tensor, records: Records, rows: Tensor, carries: Sequence[Carry]
) -> None:
    """See the package."""
    extension.kernels().decay_attention_segments(
        *_layer(x, caches, out),
        records.state,
        records.log_transition,
        rows,
        [c.log_transition for c in carries],
        [c.state for c in carries],
    )


def decay_attention_compose(
    x: Inputs,
    caches: Caches,
    out: Tensor,
    records: Records,
    rows: Tensor,
    ops: Tensor,
    relocation: Relocation | None = None,
) -> None:
    """See the package."""
    moves = (None, None, False)
    if relocation is not None:
        moves = relocation.shifts, relocation.table, relocation.neighbours
    extension.kernels().decay_attention_compose(
        *_layer(x, caches, out), records.state, records.log_transition, rows, ops, *moves
    )


def _layer(x: Inputs, caches: Caches, out: Tensor) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v, x.g, caches.slots, caches.state, out
