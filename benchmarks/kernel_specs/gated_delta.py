"""Specs of the gated delta rule's kernels, with gates of heads and with gates of channels."""

from __future__ import annotations

from typing import Any

from vllm_hypic.backends.ops.gated_delta.triton import capture, channel_terms, compose, terms
from vllm_hypic.backends.ops.gated_delta.triton.scan import constants
from vllm_hypic.backends.ops.linear_layer.triton.columns import ColumnShape
from vllm_hypic.backends.ops.linear_layer.triton.plan import CHUNKS

from .spec import SM100, KernelSpec, Limits

# -- terms of chunks

_TERMS_ALIGNED = {
    "conv_ptr": "*bf16",
    **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "terms_ptr"), "*fp32"),
    "chunks_ptr": "*i32",
    "channels": "i32",
}
_TERMS_LOOSE = {
    **dict.fromkeys(("a_ptr", "b_ptr"), "*bf16"),
    **dict.fromkeys(("a_row", "b_row"), "i32"),
    **dict.fromkeys(("eps", "scale"), "fp32"),
}

_TERMS = tuple(
    KernelSpec(
        f"gated_delta terms C={C}",
        terms.terms_kernel,
        {**_TERMS_ALIGNED, **_TERMS_LOOSE},
        {
            **{"KEY_HEADS": 16, "HEADS": 32, "K": 128, "V": 128},
            "C": C,
            "BLOCK": terms.block_floats(C, 128, 128),
            "SLICE": terms.SLICE,
        },
        warps=terms.WARPS,
        stages=3,
        aligned=tuple(_TERMS_ALIGNED),
        limit=Limits(mma=1),
    )
    for C in CHUNKS
)

_CHANNELS = {
    **dict.fromkeys(("conv_ptr", "a_ptr"), "*bf16"),
    **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "terms_ptr"), "*fp32"),
    "chunks_ptr": "*i32",
    **dict.fromkeys(("channels", "a_row"), "i32"),
}
_CHANNELS_LOOSE = {"b_ptr": "*bf16", "b_row": "i32", **dict.fromkeys(("eps", "scale", "gate_bound"), "fp32")}

_CHANNEL_TERMS = tuple(
    KernelSpec(
        f"gated_delta channel terms C={C}",
        channel_terms.channel_terms_kernel,
        {**_CHANNELS, **_CHANNELS_LOOSE},
        {
            **{"KEY_HEADS": 32, "HEADS": 32, "K": 128, "V": 128},
            "C": C,
            **{"GIVEN": False, "BOUNDED": False},
            "BLOCK": C * (3 * 128 + 128 + C) + 128,
            "SLICE": channel_terms.SLICE,
        },
        warps=channel_terms.warps(C),
        stages=3,
        aligned=tuple(_CHANNELS),
        limit=Limits(mma=1),
    )
    for C in CHUNKS
)

# -- composition

_COMPOSE_ALIGNED = {
    **dict.fromkeys(("conv_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("terms_ptr", "state_ptr", "record_ptr"), "*fp32"),
    **dict.fromkeys(("chunks_ptr", "scans_ptr", "steps_ptr"), "*i32"),
    "blocks_ptr": "*fp16",
    **dict.fromkeys(("channels", "state_slot", "state_head", "state_v", "out_row", "out_head"), "i32"),
    "record_slot": "i32",
}
_COMPOSE_LOOSE = {"slots_ptr": "*i32", "block_of_ptr": "*i32", "block_of_slot": "i32"}

_COMPOSE = tuple(
    KernelSpec(
        f"gated_delta compose C={C}, gates of {gates}",
        compose.compose_kernel,
        {**_COMPOSE_ALIGNED, **_COMPOSE_LOOSE},
        {"state_k": 1, **constants(C, 128, 128, key_heads, 32, gates == "channels")},
        warps=ColumnShape.of(C, 128, 128).warps,
        stages=compose.STAGES,
        aligned=tuple(_COMPOSE_ALIGNED),
        # At most 12 spilled words per thread on a B200, and 6 on other GPUs. Gates of channels have float32
        # keys, which take two parts in registers, and may spill 26.
        limit=Limits(mma=1, stack=24 if gates == "heads" else 104),
        limits={SM100: Limits(mma=1, stack=48 if gates == "heads" else 104)},
    )
    for gates, key_heads in (("heads", 16), ("channels", 32))
    for C in CHUNKS
)

# -- capture

_TABLES = dict.fromkeys(("chunks_ptr", "scans_ptr", "summaries_ptr", "alive_ptr", "block_of_ptr"), "*i32")
_FLOATS = dict.fromkeys(("terms_ptr", "state_ptr", "edges_ptr", "transitions_ptr"), "*fp32")
_STRIDES = dict.fromkeys(
    ("channels", "state_slot", "state_head", "state_v", "out_row", "out_head", "block_of_slot"), "i32"
)
_TYPES = {
    **_TABLES,
    **_FLOATS,
    **_STRIDES,
    **dict.fromkeys(("conv_ptr", "out_ptr"), "*bf16"),
    "blocks_ptr": "*fp16",
    "slots_ptr": "*i32",
    "summaries": "i32",
    **dict.fromkeys(("tiny", "dead_below"), "fp32"),
}
_CAPTURE_LOOSE = ("slots_ptr", "block_of_ptr", "block_of_slot", "summaries", "tiny", "dead_below")


def _spec(name: str, kernel: Any, given: dict[str, int], warps: int, stages: int) -> KernelSpec:
    types = {argument: _TYPES[argument] for argument in kernel.arg_names if argument not in given}
    aligned = tuple(argument for argument in types if argument not in _CAPTURE_LOOSE)
    return KernelSpec(name, kernel, types, given, warps, stages, aligned, Limits(mma=1, stack=16))


_CAPTURE = (
    *(
        _spec(
            f"gated_delta capture, gates of {gates}",
            capture.capture_kernel,
            {"state_k": 1, **constants(CHUNKS[-1], 128, 128, key_heads, 32, gates == "channels")},
            ColumnShape.of(CHUNKS[-1], 128, 128).warps,
            capture.STAGES,
        )
        for gates, key_heads in (("heads", 16), ("channels", 32))
    ),
    _spec(
        "gated_delta records",
        capture.records_kernel,
        {"HEADS": 32, "K": 128, "V": 128, "COLUMNS": capture.RECORD_COLUMNS, "SLICE": capture.RECORD_SLICE},
        4,
        3,
    ),
)

SPECS = (*_TERMS, *_CHANNEL_TERMS, *_COMPOSE, *_CAPTURE)
