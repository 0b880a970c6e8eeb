"""Specs of the causal convolution's kernels, which linear layers share."""

from __future__ import annotations

from vllm_hypic.backends.ops.linear_layer.triton import convolution

from .spec import KernelSpec, Limits

_ALIGNED = {
    **dict.fromkeys(("x_ptr", "cache_ptr", "tail_ptr"), "*bf16"),
    **dict.fromkeys(("x_row", "cache_slot", "cache_row", "tail_slot", "tail_row", "channels"), "i32"),
}
_CONVOLVED = {
    **_ALIGNED,
    **{"out_ptr": "*bf16", "weight_ptr": "*fp32", "chunks_ptr": "*i32", "gate_row": "i32", "out_row": "i32"},
}
_UPDATED = {**_ALIGNED, "contexts_ptr": "*i32"}

_CONSTANTS = {"cache_channel": 1, "PARTS": 2, "ROWS": convolution.ROWS, "BLOCK": convolution.CHANNELS}
_GIVEN = {"bias_ptr": "*fp32", "gate_ptr": "*bf16"}


def _convolution(name: str, taps: int, *given: str) -> KernelSpec:
    """Return the spec of a convolution of ``taps`` taps, with the named pointers of ``_GIVEN``."""
    aligned = {**_CONVOLVED, **{pointer: _GIVEN[pointer] for pointer in given}}
    left_out = {pointer: None for pointer in _GIVEN if pointer not in given}
    return KernelSpec(
        f"linear_layer convolve {name}",
        convolution.convolve_kernel,
        {**aligned, "slots_ptr": "*i32"},
        {**_CONSTANTS, **left_out, "TAPS": taps},
        warps=8,
        stages=3,
        aligned=tuple(aligned),
        limit=Limits(registers=96),
    )


SPECS = (
    _convolution("gated_delta", 4),
    _convolution("mamba2", 4, "bias_ptr"),
    _convolution("short_conv", 3, "gate_ptr"),
    KernelSpec(
        "linear_layer contexts",
        convolution.contexts_kernel,
        {**_UPDATED, "slots_ptr": "*i32"},
        {"cache_channel": 1, "TAPS": 4, "BLOCK": convolution.CONTEXT_CHANNELS},
        warps=4,
        stages=3,
        aligned=tuple(_UPDATED),
        limit=Limits(registers=128),
    ),
)
