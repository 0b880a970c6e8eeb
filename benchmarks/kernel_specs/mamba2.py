"""Specs of Mamba2's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_hypic.backends.ops.linear_layer.triton.plan import CHUNKS
from vllm_hypic.backends.ops.mamba2.triton import capture, compose, scan

from .spec import KernelSpec, Limits

_SIZES = (128, 256)
"""Sizes of states for which the kernels are compiled."""


def _spec(name: str, kernel: Any, types: Mapping[str, str], chunk: int, N: int) -> KernelSpec:
    """Return the spec of ``kernel`` for a launch with 64 heads of 64 columns in 8 groups; arguments in
    ``types`` are aligned, slots are not."""
    given = scan.launch(chunk, 64, 8, 64, N)
    warps, stages = given.pop("num_warps"), given.pop("num_stages")
    # At most 12 spilled words per thread.
    aligned, limit = tuple(types), Limits(mma=1, stack=48)
    name, types = f"mamba2 {name} C={chunk} N={N}", {**types, "slots_ptr": "*i32"}
    return KernelSpec(name, kernel, types, given, warps, stages, aligned, limit)


_COMPOSE = {
    **dict.fromkeys(("conv_ptr", "dt_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "D_ptr"), "*fp32"),
    **dict.fromkeys(("chunks_ptr", "scans_ptr", "steps_ptr"), "*i32"),
    **dict.fromkeys(("state_ptr", "record_ptr", "record_log_ptr"), "*fp32"),
    **dict.fromkeys(("channels", "dt_row", "state_slot", "state_head", "out_row", "out_head"), "i32"),
    **dict.fromkeys(("record_slot", "record_log_slot"), "i32"),
}

_CAPTURE = {
    **dict.fromkeys(("conv_ptr", "dt_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "D_ptr"), "*fp32"),
    **dict.fromkeys(("chunks_ptr", "scans_ptr", "summaries_ptr"), "*i32"),
    **dict.fromkeys(("state_ptr", "carried_ptr", "record_ptr", "record_log_ptr"), "*fp32"),
    "carried_log_ptr": "*fp64",
    **dict.fromkeys(("channels", "dt_row", "state_slot", "state_head", "out_row", "out_head"), "i32"),
    **dict.fromkeys(("record_slot", "record_log_slot"), "i32"),
}

SPECS = (
    *(_spec("compose", compose.compose_kernel, _COMPOSE, C, N) for C in CHUNKS for N in _SIZES),
    *(_spec("capture", capture.capture_kernel, _CAPTURE, CHUNKS[-1], N) for N in _SIZES),
)
