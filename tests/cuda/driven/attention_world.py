"""A batch of plain, composed and captured rows for the CUDA attention implementation, on the CPU.

FlashAttention alone is a stand-in, computed in float64; the implementation, its plans and its Triton
operators are the real ones.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_attention import attend, stream, table_of
from mixed_batch import pass_of, starts_of
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from vllm_hypic.backends.attention.cuda import CUDAAttentionLink, HypicCUDAAttentionImpl
from vllm_hypic.backends.attention.cuda_fp8 import Scales
from vllm_hypic.backends.ops.span_attention.eager import rotate
from vllm_hypic.backends.ops.span_attention.triton import operators
from vllm_hypic.patches import cuda_kept_lse
from vllm_hypic.pool.geometry import FP8, AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.tensors import DevicePool, quantised

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, ROTARY = 4, 2, 32, 16
TABLE = table_of(128, ROTARY)
BLOCK = 16
SLOTS = 64
"""Token slots of the pool."""
SCALES = 0.03, 0.02, 0.025
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error allowed, in units of V, which is about 1."""


def install(patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Calls of FlashAttention are these, whose log-sum-exp is kept."""
    kernel: Any = flash_attn.FA4DenseAttentionKernel
    patch.setattr(kernel, "__call__", kernel.__call__)
    cuda_kept_lse.apply()
    patch.setattr(flash_attn, "flash_attn_varlen_func", call, raising=False)


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    window_size: list[int] | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> Any:
    """``flash_attn_varlen_func`` over a paged cache, in float64; lengths that it is told must fit."""
    left, right = (-1, -1) if window_size is None else window_size
    assert causal and right == (-1 if left == -1 else 0)
    assert not others.get("softcap")
    assert k.dtype != FP8 or others["fa_version"] == 3
    # The 4th leaves no log-sum-exp unless it is another kernel, which nobody asks it for.
    assert others["fa_version"] in (2, 3) or not return_softmax_lse
    # Nothing here relies on whether a log-sum-exp has sinks in it.
    assert s_aux is None or not return_softmax_lse
    starts, used = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(block_table) == len(used) == len(starts) - 1 and starts[-1] == len(q)
    assert max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
    assert max_seqlen_k >= max(used)
    kind = q.dtype
    if k.dtype == FP8:
        assert q.dtype == v.dtype == FP8
        descales: list[Any] = [others[f"{x}_descale"] for x in "qkv"]
        assert {scale.shape for scale in descales} == {(len(used), k.shape[2])}
        kind = torch.bfloat16
        q, k, v = (x.double() * scale[0, 0] for x, scale in zip((q, k, v), descales, strict=True))
    result = torch.empty(q.shape, dtype=kind) if out is None else out
    lse = torch.empty(q.shape[1], len(q))
    for i, tokens in enumerate(used):
        blocks = block_table[i, : -(-tokens // k.shape[1])].long()
        key, value = (t[blocks].flatten(0, 1)[:tokens] for t in (k, v))
        rows = slice(starts[i], starts[i + 1])
        seen = torch.arange(tokens - (rows.stop - rows.start), tokens) + 1
        hidden = (seen - 1 - left).clamp(min=0) if left >= 0 else torch.zeros_like(seen)
        key, value, first = key[hidden.min() :], value[hidden.min() :], hidden.min()
        result[rows], lse[:, rows] = attend(
            q[rows], key, value, seen - first, softmax_scale, hidden - first, s_aux
        )
    return (result, lse) if return_softmax_lse else result


@dataclass
class World:
    """One attention layer and a batch: a plain decode, a composed prefill, a segment request, a composed
    decode, a composed request that sees nothing yet, and poisoned padding.

    With a ``window`` the layer has one, vLLM has given away the blocks behind it, and the segment request has
    padding inside.  ``drafts``: rows that the requests that decode have beside their first.  ``scales``: the
    query, K and V of the cache, and records are FP8 and count times these.
    """

    dtype: torch.dtype
    table: torch.Tensor | None
    neox: bool = True
    window: int | None = None
    sinks: bool = False
    drafts: int = 0
    scales: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(7)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=gen).to(self.dtype)

        geometry = PoolGeometry(
            (AttentionGeometry("layer", KV_HEADS, SIZE, FP8 if self.scales else self.dtype),),
            (),
            page_tokens=8,
            pages=SLOTS // 8,
            slots=8,
        )
        self.pool = DevicePool(geometry, CPU)
        of_query, *of_records = self.scales or (1.0, 1.0, 1.0)
        self.pool.scale("layer", *of_records)
        self.public = self.pool.kv["layer"]
        self.public.key.fill_(math.nan), self.public.value.fill_(math.nan)
        self.runtime = HypicRuntime(self.pool, 0.0)

        # Two records, their columns scattered over the pool.
        places = torch.randperm(SLOTS, generator=gen)
        self.columns = places[:19], places[19:30]
        for slots in self.columns:
            self.public.write(slots, *(normal(len(slots), KV_HEADS, SIZE) for _ in "kv"))
        self.capture_slots = places[30:36].numpy()

        self.prefill = stream(self.columns, [0, 1], [3, 5], 9)
        self.decode, self.blind = stream(self.columns, [1], [2], 3), stream(self.columns, [0], [4], 6)
        padded = None if self.window is None else np.array([0, 1, 2, 3, 10, 11, 12, 13, 14])
        capture = CapturePlan(2, 8, 0, self.capture_slots, padded, leading=False)
        # (tokens behind it, tokens in this pass)
        self.lengths = [(20, 1 + self.drafts), (2, 7), (3, 6), (17, 1 + self.drafts), (0, 4)]
        self.starts = starts_of(self.lengths)
        plans = {1: self.prefill, 3: self.decode, 4: self.blind}
        self.step = pass_of(self.lengths, plans, {2: capture})
        self.runtime.step = self.step
        # Tokens 3 to 8 of it are of its interior and in this pass.
        self.capture_positions = torch.arange(3, 8)

        tokens = self.starts[-1]
        self.query = torch.full((tokens + 3, HEADS, SIZE), math.nan, dtype=self.dtype)
        self.query[:tokens] = normal(tokens, HEADS, SIZE)
        self.key = torch.full((tokens + 3, KV_HEADS, SIZE), math.nan, dtype=self.dtype)
        self.value = self.key.clone()
        self.key[:tokens], self.value[:tokens] = (normal(tokens, KV_HEADS, SIZE) for _ in "kv")

        # vLLM's cache; K of the private stream is rotated by whoever put it there.
        used = [s0 + n for s0, n in self.lengths]
        blocks = [-(-n // BLOCK) for n in used]
        order = torch.randperm(sum(blocks), generator=gen) + 1
        self.table_of_blocks = torch.zeros(len(used), max(blocks), dtype=torch.int32)
        self.cache = torch.full((sum(blocks) + 1, KV_HEADS, BLOCK, 2 * SIZE), math.nan, dtype=self.dtype)
        self.private: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, (s0, n) in enumerate(self.lengths):
            mine = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
            self.table_of_blocks[i, : len(mine)] = mine
            key, value = normal(s0 + n, KV_HEADS, SIZE), normal(s0 + n, KV_HEADS, SIZE)
            key[s0:], value[s0:] = (t[self.starts[i] : self.starts[i + 1]] for t in (self.key, self.value))
            self.private.append((key, value))
            gone = 0 if self.window is None else max(0, s0 + 1 - self.window) // BLOCK
            self.table_of_blocks[i, :gone] = 0
            for t in range(gone * BLOCK, s0 + n):
                row = self.cache[mine[t // BLOCK], :, t % BLOCK]
                row[:, :SIZE], row[:, SIZE:] = key[t], value[t]
        self.metadata = FlashAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=max(n for _, n in self.lengths),
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            max_seq_len=max(used),
            seq_lens=torch.tensor(used, dtype=torch.int32),
            block_table=self.table_of_blocks,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        )
        self.impl = HypicCUDAAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, self.window, "auto")
        self.impl.vllm_flash_attn_version = 2
        tensors = [torch.tensor(x) for x in (of_query, *of_records)]
        self.layer = SimpleNamespace(
            kv_cache=self.cache,
            dtype=self.dtype,
            **{f"_{x}_scale": one for x, one in zip("qkv", tensors, strict=True)},
            **{f"_{x}_scale_float": one.item() for x, one in zip("qkv", tensors, strict=True)},
        )
        if self.scales:
            self._quantise()
        if self.sinks:
            # About as large as the sum over the columns of some rows.
            self.impl.sinks = torch.linspace(0, 3, HEADS).to(self.dtype)
        rope = SimpleNamespace(cos_sin_cache=self.table, is_neox_style=self.neox)
        rope = None if self.table is None else rope
        scales = Scales.of(self.layer) if self.scales else None
        self.impl.link = CUDAAttentionLink(self.runtime, self.public, rope, operators, scales)

    def _quantise(self) -> None:
        """What vLLM has quantised before attention runs; what is expected is of the same numbers."""
        of_query, of_key, of_value = self.scales
        self.impl.kv_cache_dtype, self.impl.vllm_flash_attn_version = "fp8", 3
        bytes_of = torch.empty(self.cache.shape, dtype=FP8)
        bytes_of[..., :SIZE] = quantised(self.cache[..., :SIZE], of_key)
        bytes_of[..., SIZE:] = quantised(self.cache[..., SIZE:], of_value)
        self.cache = self.layer.kv_cache = bytes_of.view(torch.uint8)
        self.query = quantised(self.query, of_query)
        self.private = [
            (quantised(key, of_key).double() * of_key, quantised(value, of_value).double() * of_value)
            for key, value in self.private
        ]

    def forward(self) -> torch.Tensor:
        """The rows that count."""
        output = torch.full(self.query.shape, math.nan, dtype=self.dtype)
        self.impl.forward(
            self.layer, self.query, self.key, self.value, self.cache, self.metadata, output=output
        )
        assert output[self.starts[-1] :].isnan().all(), "padding was written"
        return output[: self.starts[-1]]

    def expected(self) -> torch.Tensor:
        """Full attention of every row, in float64; windows are measured in the prompt."""
        parts = []
        composed = {c.row.index: c.stream.plan for c in self.step.composed}
        padded = {c.row.index: c.plan.positions for c in self.step.captures}
        for i, (s0, n) in enumerate(self.lengths):
            private_key, private_value = (t.double() for t in self.private[i])
            positions = composed[i].logical(0, s0 + n) if i in composed else padded.get(i)
            if positions is None:
                positions = np.arange(s0 + n)
            for r, row in enumerate(range(self.starts[i], self.starts[i + 1])):
                key, value = private_key[: s0 + r + 1], private_value[: s0 + r + 1]
                at = torch.from_numpy(positions[: s0 + r + 1])
                if i in composed:
                    plan = composed[i]
                    seen = int(plan.visible_kv_lens(s0 + r, s0 + r + 1)[0])
                    slots = torch.from_numpy(plan.slot_mapping[:seen])
                    columns = torch.from_numpy(plan.kv_positions[:seen])
                    rotation = None if self.table is None else self.table[columns]
                    public_key = self.public.key[slots].double() * self.public.key_scale
                    public_value = self.public.value[slots].double() * self.public.value_scale
                    key = torch.cat([rotate(public_key, rotation, self.neox).double(), key])
                    value = torch.cat([public_value, value])
                    at = torch.cat([columns, at])
                if self.window is not None:
                    near = at > positions[s0 + r] - self.window
                    key, value = key[near], value[near]
                query = self.query[row : row + 1].double() * (self.scales or (1.0,))[0]
                given = query, key, value, torch.tensor([len(key)]), SIZE**-0.5
                parts.append(attend(*given, sinks=self.impl.sinks)[0])
        return torch.cat(parts)

    def check(self, expected: torch.Tensor | None = None) -> torch.Tensor:
        """The pass's rows get full attention, or what is expected: what they get."""
        wanted = self.expected() if expected is None else expected
        found = self.forward()
        error = (found.double() - wanted).abs().max()
        assert error < LIMITS[self.dtype], error
        return found
