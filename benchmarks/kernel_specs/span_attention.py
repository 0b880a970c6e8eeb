"""Specs of span attention's kernels, of its merges and captures, and of attention over latents."""

from __future__ import annotations

import torch

from vllm_hypic.backends.ops.span_attention.plan import FEW_ROWS, MERGE_FIELDS
from vllm_hypic.backends.ops.span_attention.triton import capture, kernels, latents, merge
from vllm_hypic.backends.ops.span_attention.triton.tiles import HeadTiles

from .spec import ARCHITECTURES, SHARED_PER_BLOCK, SM80, SM90, SM100, KernelSpec, Limits

_IN_FLIGHT = 1 << 16
"""Bytes of K and V that a multiprocessor should have requested while decoding: twice what an H200's memory
delivers to one of 132 multiprocessors within 0.8 us, about the duration of a memory request."""


def _decode_limits(launch: kernels.Launch, tiles: HeadTiles, dtype: torch.dtype, pool: str) -> Limits:
    """Return limits for a decoding launch, whose tokens wait for memory.  Enough blocks must fit on a
    multiprocessor to hide the wait; each block has requested its next columns of K and V.  FP8, converted to
    the query's type, takes more registers: two blocks must fit, even if they hide less."""
    ahead = launch.columns * 2 * tiles.size_tile * dtype.itemsize
    blocks = max(2, -(-_IN_FLIGHT // ahead)) if pool == "*bf16" else 2
    registers = 65_536 // (blocks * launch.warps * 32) // 8 * 8
    return Limits(registers=min(255, registers), shared=SHARED_PER_BLOCK[SM80] // blocks, mma=2)


def _attention_spec(
    name: str,
    size: int,
    rotary_dim: int,
    block: int,
    architectures: tuple[int, ...],
    *,
    neox: bool = True,
    kv_heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    windowed: bool = False,
    block_size: int = 1,
    pool: str = "*bf16",
) -> KernelSpec:
    tiles = HeadTiles.of(size, rotary_dim)
    launch = kernels.Launch.of(block, tiles, dtype)
    pools = ("query", "pool_key", "pool_value")
    strides = [f"{pool.removeprefix('pool_')}_{kind}" for pool in pools for kind in ("stride", "head_stride")]
    strides += ["table_stride", "token_stride"]
    tables = ["table"] if rotary_dim else []
    indices = ["slots", "positions", "visible_kv_lens", "items", *(["hidden_kv_lens"] if windowed else [])]
    return KernelSpec(
        f"span_attention[{name}, {block} rows]",
        kernels.span_attention_kernel,
        {
            **dict.fromkeys((*pools, *tables), "*fp32" if dtype == torch.float32 else "*bf16"),
            **({} if dtype == torch.float32 else dict.fromkeys(pools[1:], pool)),
            **dict.fromkeys(indices, "*i32"),
            **dict.fromkeys(("out", "lse", "part_out", "part_lse"), "*fp32"),
            **dict.fromkeys(strides, "i32"),
            "scale_log2": "fp32",
        },
        {
            **kernels.constants(kv_heads, 8, tiles, neox, dtype),
            **({} if tables else {"table": None}),
            **({} if windowed else {"hidden_kv_lens": None}),
            "ROWS": block,
            "COLUMNS": launch.columns,
            "BLOCK": block_size,
        },
        launch.warps,
        launch.stages,
        aligned=(
            *(*pools, *tables, *strides, *indices),
            *("out", "lse", "part_out", "part_lse"),
        ),
        limit=_decode_limits(launch, tiles, dtype, pool) if block == FEW_ROWS else Limits(mma=2),
        architectures=architectures,
    )


_KERNELS = (
    _attention_spec("64", 64, 64, FEW_ROWS, (SM90,)),
    _attention_spec("64", 64, 64, 128, (SM90,)),
    _attention_spec("128", 128, 128, FEW_ROWS, ARCHITECTURES),
    _attention_spec("128", 128, 128, 64, (SM80,)),
    _attention_spec("128", 128, 128, 128, (SM90, SM100)),
    _attention_spec("128 interleaved", 128, 128, 128, (SM90,), neox=False),
    _attention_spec("256, 64 rotated", 256, 64, FEW_ROWS, (SM90,), kv_heads=2),
    _attention_spec("256, 64 rotated", 256, 64, 64, (SM80, SM100), kv_heads=2),
    _attention_spec("256, 64 rotated", 256, 64, 128, (SM90,), kv_heads=2),
    *(_attention_spec("64, window", 64, 64, block, (SM90,), windowed=True) for block in (FEW_ROWS, 128)),
    _attention_spec("128, window", 128, 128, FEW_ROWS, (SM80,), windowed=True),
    *(
        _attention_spec("64, vLLM's cache", 64, 0, block, (SM90,), windowed=True, block_size=16)
        for block in (FEW_ROWS, 128)
    ),
    *(
        _attention_spec("256, vLLM's cache", 256, 0, block, of, kv_heads=2, windowed=True, block_size=16)
        for block, of in ((64, (SM80, SM100)), (128, (SM90,)))
    ),
    # FlashAttention reads FP8 on Hopper.
    *(
        _attention_spec("128, FP8", 128, 128, block, (SM90,), windowed=windowed, pool="*fp8e4nv")
        for block in (FEW_ROWS, 128)
        for windowed in (False, True)
    ),
    *(
        _attention_spec(
            "128, vLLM's cache in FP8",
            *(128, 0, block, (SM90,)),
            windowed=True,
            block_size=16,
            pool="*fp8e4nv",
        )
        for block in (FEW_ROWS, 128)
    ),
    *(
        _attention_spec("256, 64 rotated, FP8", 256, 64, block, (SM90,), kv_heads=2, pool="*fp8e4nv")
        for block in (FEW_ROWS, 128)
    ),
    _attention_spec("256, 64 rotated, fp32", 256, 64, 32, (SM80,), kv_heads=2, dtype=torch.float32),
    *(
        KernelSpec(
            f"merge_parts[{size}]",
            kernels.merge_parts_kernel,
            {"merges": "*i32", **dict.fromkeys(("part_out", "part_lse", "out", "lse"), "*fp32")},
            {
                "KV_HEADS": kv_heads,
                "GROUP": group,
                "SIZE": size,
                "SIZE_TILE": size,
                "PARTS": kernels.MERGED_PARTS,
                "FIELDS": MERGE_FIELDS,
            },
            warps=4,
            stages=3,
            aligned=("merges", "part_out", "part_lse", "out", "lse"),
        )
        for size, kv_heads, group in ((256, 2, 8), (512, 1, 16))
    ),
)


# -- latents


def _latent_spec(
    name: str,
    block: int,
    architectures: tuple[int, ...],
    *,
    neox: bool = False,
    block_size: int = 1,
    heads: int = 16,
) -> KernelSpec:
    rotated = block_size == 1
    launch = latents.launch(block)
    tensors = ("query", "query_pe", "latents", "keys", *(("table",) if rotated else ()))
    strides = (
        *("query_stride", "query_head_stride", "pe_stride", "pe_head_stride"),
        *("slot_stride", "token_stride", "table_stride"),
    )
    results = ("out", "lse", "part_out", "part_lse")
    indices = ("visible_kv_lens", "items")
    unaligned = ("slots", *(("positions",) if rotated else ()))
    return KernelSpec(
        f"latents[{name}, {block} rows]",
        latents.latent_attention_kernel,
        {
            **dict.fromkeys(tensors, "*bf16"),
            **dict.fromkeys((*indices, *unaligned), "*i32"),
            **dict.fromkeys(results, "*fp32"),
            **dict.fromkeys(strides, "i32"),
            "scale_log2": "fp32",
        },
        {
            **latents.constants(heads, 512, 64, rotated, neox, torch.bfloat16),
            **({} if rotated else {"positions": None, "table": None}),
            "ROWS": block,
            "COLUMNS": launch["COLUMNS"],
            "BLOCK": block_size,
        },
        launch["num_warps"],
        launch["num_stages"],
        aligned=(*tensors, *strides, *results, *indices),
        limit=Limits(mma=2),
        architectures=architectures,
    )


_LATENTS = (
    *(_latent_spec("512 + 64", block, ARCHITECTURES) for block in (FEW_ROWS, 32)),
    _latent_spec("512 + 64, halves", 32, (SM90,), neox=True),
    _latent_spec("512 + 64, vLLM's cache", FEW_ROWS, (SM90,), block_size=64),
    _latent_spec("512 + 64, vLLM's cache", 32, ARCHITECTURES, block_size=64),
)


# -- merge


def _merge_spec(
    name: str, lse_stride: dict[str, str], constants: dict[str, int], output: str = "*bf16"
) -> KernelSpec:
    return KernelSpec(
        name,
        merge.merge_kernel,
        {
            "output": output,
            **dict.fromkeys(("output_lse", "other", "other_lse"), "*fp32"),
            "token_rows": "*i32",
            **dict.fromkeys(("rows", "output_stride", "output_head_stride", "lse_head_stride"), "i32"),
            **lse_stride,
        },
        {"HEADS": 16, "SIZE": 256, "SIZE_TILE": 256, "ROWS": merge.rows_at_once(256), **constants},
        warps=4,
        stages=3,
        aligned=(
            *("output", "output_stride", "output_head_stride", "output_lse"),
            *("other", "other_lse", "token_rows", *lse_stride),
        ),
    )


_MERGE = (
    _merge_spec("merge[256]", {}, {"lse_stride": 1}),
    _merge_spec("merge[256, ours in both parts]", {"lse_stride": "i32"}, {}),
    _merge_spec(
        "merge[512 of latents]",
        {"lse_stride": "i32"},
        {"SIZE": 512, "SIZE_TILE": 512, "ROWS": merge.rows_at_once(512)},
        "*fp32",
    ),
)


# -- capture


def _capture_spec(
    name: str,
    size: int,
    rotary_dim: int,
    neox: bool,
    value_size: int | None = None,
    block: int = 1,
    *,
    fp8: bool = False,
) -> KernelSpec:
    tiles = HeadTiles.of(size, rotary_dim)
    tensors = ("key", "value", "pool_key", "pool_value", "table")
    scales = ("key_scale", "value_scale")
    strides = (
        *(f"{tensor}_stride" for tensor in tensors),
        *("key_head_stride", "value_head_stride", "token_stride"),
    )
    return KernelSpec(
        f"capture[{name}]",
        capture.capture_kernel,
        {
            **dict.fromkeys(tensors, "*bf16"),
            **(dict.fromkeys(("pool_key", "pool_value"), "*fp8e4nv") if fp8 else {}),
            **(dict.fromkeys(scales, "fp32") if fp8 else {}),
            **dict.fromkeys(("rows", "slots", "positions"), "*i64"),
            **dict.fromkeys(("count", *strides), "i32"),
        },
        {
            **capture.constants(tiles, value_size or size, neox, block),
            **({} if fp8 else dict.fromkeys(scales)),
        },
        warps=4,
        stages=3,
        aligned=(*tensors, *strides),
        architectures=(SM90,) if fp8 else ARCHITECTURES,
    )


_CAPTURE = (
    _capture_spec("128", 128, 128, True),
    _capture_spec("256, 64 rotated, interleaved", 256, 64, False),
    *(
        _capture_spec(f"{size}, FP8", size, size, neox, fp8=True)
        for size, neox in ((128, True), (128, False))
    ),
    _capture_spec("512 + 64 of latents", 64, 64, False, value_size=512, block=64),
)

SPECS = (*_KERNELS, *_LATENTS, *_MERGE, *_CAPTURE)
