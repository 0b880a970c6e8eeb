"""Specs of the gated delta rule's kernels, with gates of heads and with gates of channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_hypic.backends.ops.gated_delta.triton import capture, channel_terms, compose, terms
from vllm_hypic.backends.ops.gated_delta.triton.scan import constants
from vllm_hypic.backends.ops.linear_layer.triton.columns import ColumnShape
from vllm_hypic.backends.ops.linear_layer.triton.plan import CHUNKS

from .spec import SM100, KernelSpec, Limits

_LIMIT = Limits(mma=1)


def _spec(
    name: str,
    kernel: Any,
    aligned: Mapping[str, str],
    loose: Mapping[str, str],
    given: Mapping[str, int | bool],
    *,
    warps: int,
    stages: int = 3,
    limit: Limits = _LIMIT,
    limits: Mapping[int, Limits] | None = None,
) -> KernelSpec:
    """Return the spec of a kernel with constants ``given``; ``loose``: arguments that need no alignment."""
    types = {**aligned, **loose}
    return KernelSpec(
        f"gated_delta {name}", kernel, types, given, warps, stages, tuple(aligned), limit, limits or {}
    )


_SIZES = {"HEADS": 32, "K": 128, "V": 128}

# -- terms of chunks

_CHUNK = {
    "conv_ptr": "*bf16",
    **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "terms_ptr"), "*fp32"),
    "chunks_ptr": "*i32",
    "channels": "i32",
}
_SCALES = dict.fromkeys(("eps", "scale"), "fp32")

_TERMS = tuple(
    _spec(
        f"terms C={C}",
        terms.terms_kernel,
        _CHUNK,
        {**dict.fromkeys(("a_ptr", "b_ptr"), "*bf16"), **dict.fromkeys(("a_row", "b_row"), "i32"), **_SCALES},
        {**_SIZES, "KEY_HEADS": 16, "C": C, "BLOCK": terms.block_floats(C, 128, 128), "SLICE": terms.SLICE},
        warps=terms.WARPS,
    )
    for C in CHUNKS
)
_CHANNEL_TERMS = tuple(
    _spec(
        f"channel terms C={C}",
        channel_terms.channel_terms_kernel,
        {**_CHUNK, "a_ptr": "*bf16", "a_row": "i32"},
        {"b_ptr": "*bf16", "b_row": "i32", "gate_bound": "fp32", **_SCALES},
        {
            **_SIZES,
            **{"KEY_HEADS": 32, "C": C, "GIVEN": False, "BOUNDED": False},
            **{"BLOCK": terms.block_floats(C, 128, 128, True), "SLICE": channel_terms.SLICE},
        },
        warps=channel_terms.warps(C),
    )
    for C in CHUNKS
)

# -- composition and capture

_GATES = (("heads", 16), ("channels", 32))
_SCAN = {
    **dict.fromkeys(("conv_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("terms_ptr", "state_ptr"), "*fp32"),
    **dict.fromkeys(("chunks_ptr", "scans_ptr"), "*i32"),
    **dict.fromkeys(("channels", "state_slot", "state_head", "state_v", "out_row", "out_head"), "i32"),
}

_COMPOSE = tuple(
    _spec(
        f"compose C={C}, gates of {gates}",
        compose.compose_kernel,
        {**_SCAN, "record_ptr": "*fp32", "steps_ptr": "*i32", "blocks_ptr": "*fp16", "record_slot": "i32"},
        {"slots_ptr": "*i32", "block_of_ptr": "*i32", "block_of_slot": "i32"},
        {"state_k": 1, **constants(C, 128, 128, key_heads, 32, gates == "channels")},
        warps=ColumnShape.of(C, 128, 128).warps,
        stages=compose.STAGES,
        # At most 12 spilled words per thread on a B200, and 6 on other GPUs. Gates of channels have float32
        # keys, which take two parts in registers, and may spill 26.
        limit=Limits(mma=1, stack=24 if gates == "heads" else 104),
        limits={SM100: Limits(mma=1, stack=48 if gates == "heads" else 104)},
    )
    for gates, key_heads in _GATES
    for C in CHUNKS
)

_SUMMARIES = {
    **dict.fromkeys(("summaries_ptr", "alive_ptr"), "*i32"),
    **dict.fromkeys(("edges_ptr", "transitions_ptr"), "*fp32"),
}
_CAPTURE_LIMIT = Limits(mma=1, stack=16)

_CAPTURE = (
    *(
        _spec(
            f"capture, gates of {gates}",
            capture.capture_kernel,
            {**_SCAN, **_SUMMARIES},
            {"slots_ptr": "*i32", "summaries": "i32", "tiny": "fp32"},
            {"state_k": 1, **constants(CHUNKS[-1], 128, 128, key_heads, 32, gates == "channels")},
            warps=ColumnShape.of(CHUNKS[-1], 128, 128).warps,
            stages=capture.STAGES,
            limit=_CAPTURE_LIMIT,
        )
        for gates, key_heads in _GATES
    ),
    _spec(
        "records",
        capture.records_kernel,
        {**_SUMMARIES, "state_ptr": "*fp32", "blocks_ptr": "*fp16", "state_slot": "i32"},
        {"block_of_ptr": "*i32", "block_of_slot": "i32", "summaries": "i32", "dead_below": "fp32"},
        {**_SIZES, "COLUMNS": capture.RECORD_COLUMNS, "SLICE": capture.RECORD_SLICE},
        warps=4,
        limit=_CAPTURE_LIMIT,
    ),
)

SPECS = (*_TERMS, *_CHANNEL_TERMS, *_COMPOSE, *_CAPTURE)
