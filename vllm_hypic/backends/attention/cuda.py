"""Attention backend on CUDA: vLLM's FlashAttention computes the private part, Triton the public part.

FlashAttention runs over the whole batch, unchanged, so plain rows get stock bits.  A patch keeps the
log-sum-exp of versions 2 and 3 (``patches/cuda_kept_lse.py``).  With version 4 or sinks, a second call for
the composed rows alone returns it.  FlashAttention measures windows in the stream, which lacks the tokens
that records serve.  Triton therefore also computes the private part of rows that a window cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ...pool.geometry import FP8
from ..ops.kept_lse import KEPT
from ..ops.span_attention.fixed import FixedPlans
from .base import AttentionLink, PublicAttention
from .cuda_decode import DecodePlans
from .cuda_fp8 import Scales
from .cuda_fp8 import refusal as fp8_refusal
from .cuda_rows import (
    FLOAT_BYTES,
    PARTIAL_BYTES,
    Heads,
    PrivateRows,
    SpanPiece,
    columns_of,
    private_pieces,
    replaced_rows,
    rows_of,
    span_pieces,
    token_rows,
)

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

    from ...pool.step import CapturedRows, PublicRows, ReplacedRows, StepContext

MAX_HEAD_SIZE = 256
"""Largest head size of FlashAttention 2, which runs on every supported GPU."""


class HypicFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Metadata builder that keeps mixed batches out of full CUDA graphs, which hold stock code alone.

    Mixed batches may contain composed rows: vLLM runs such batches with piecewise graphs or without graphs.
    Decode passes keep full graphs; the model runner keeps decode passes with composed rows out of these.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class HypicCUDAAttentionBackend(FlashAttentionBackend):
    """vLLM's FlashAttention plus span attention over records."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicCUDAAttentionImpl]:
        return HypicCUDAAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[HypicFlashAttentionMetadataBuilder]:
        return HypicFlashAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MAX_HEAD_SIZE and super().supports_head_size(head_size)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False


@dataclass(frozen=True)
class CUDAAttentionLink(AttentionLink):
    """The link of one attention layer on CUDA.  ``ops``: the module ``ops.span_attention.triton.operators``;
    ``scales``: the scales of a layer with query, cache and records in FP8, ``None`` for all other layers."""

    ops: ModuleType
    scales: Scales | None = None


class HypicCUDAAttentionImpl(PublicAttention[CUDAAttentionLink], FlashAttentionImpl):
    """Stock FlashAttention; with a link, it also captures segments and reads public K and V."""

    serves_quantised_cache = True

    def connect(self, layer: Any, link: AttentionLink) -> None:
        from ..ops.span_attention.triton import operators

        operators.warm_up(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            layer.dtype,
            link.table(),
            link.neox,
            link.public.key.device,
            () if self.window() is None else self.halves(layer.kv_cache),
            link.public.key.dtype,
        )
        scales = Scales.of(layer) if self.has_quantised_cache() else None
        self.link = CUDAAttentionLink(link.runtime, link.public, link.rope, operators, scales)

    def rescale(self, layer: Any) -> None:
        if self.link is not None:
            self.link = replace(self.link, scales=Scales.of(layer))

    def window(self) -> int | None:
        return None if self.sliding_window == (-1, -1) else self.sliding_window[0] + 1

    def has_quantised_cache(self) -> bool:
        return is_quantized_kv_cache(self.kv_cache_dtype)

    def refusal(self, layer: Any) -> str | None:
        from ..ops.span_attention.triton import operators

        if (reason := operators.refuses(self.head_size, "cuda")) is not None:
            return reason
        if self.attn_type != AttentionType.DECODER:
            return f"attention of kind {self.attn_type}"
        if self.dcp_world_size > 1:
            return f"a KV cache divided among {self.dcp_world_size} ranks"
        if self.has_quantised_cache() and (reason := fp8_refusal(self.vllm_flash_attn_version)) is not None:
            return reason
        return super().refusal(layer)

    def scratch_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Return the bytes that a pass of at most ``rows`` token rows in ``dtype`` takes beside the pool."""
        # The peak is a float32 result beside its partial results, or beside its copy in the model's dtype.
        # The query rows and the result of a second FlashAttention call take no more, and are freed before.
        # With sinks, a row has at most four log-sum-exps.  An FP8 query is converted to the model's dtype.
        elements = rows * self.num_heads * self.head_size
        floats = elements + 4 * rows * self.num_heads
        query = elements * dtype.itemsize if self.has_quantised_cache() else 0
        return floats * FLOAT_BYTES + query + max(PARTIAL_BYTES, elements * dtype.itemsize)

    @property
    def lse_version(self) -> int | None:
        """The FlashAttention version that the second call uses.  FA2 stands in for FA4: FA4's kernels for
        heads of 256 may not return the log-sum-exp, and FA2 runs wherever FA4 runs."""
        return 2 if self.vllm_flash_attn_version == 4 else self.vllm_flash_attn_version

    @property
    def keeps_lse(self) -> bool:
        """Whether the merge can use the log-sum-exp of the stock call.  FA4 computes it on demand alone, in
        separate kernels.  FA3's includes the sinks or not, depending on how FA3 divides the work."""
        return self.vllm_flash_attn_version in (2, 3) and self.sinks is None

    @property
    def decodes_in_fixed_shapes(self) -> bool:
        """Whether a CUDA graph can record this layer's launches of a decode pass once and replay them."""
        return self.keeps_lse and self.window() is None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention into ``output``, with the contract of the stock implementation."""
        given = layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        link = self.link
        if link is None or link.runtime.step is None or attn_metadata is None or not self.keeps_lse:
            return super().forward(*given)
        KEPT.wanted = True
        try:
            plans = self._decode_plans(link, output)
            if plans is None:
                return super().forward(*given)
            FlashAttentionImpl.forward(self, *given)
            link.runtime.calls["span_attention"] += 1
            self._add_decoded(link, plans, query, output)
        finally:
            KEPT.wanted, KEPT.lse = False, None
        return output

    def _decode_plans(self, link: CUDAAttentionLink, output: torch.Tensor) -> FixedPlans | None:
        """Return the plans of fixed shapes for a decode pass into ``output``, filled for this pass; ``None``:
        fixed plans do not serve this pass."""
        step = link.runtime.step
        if step is None or step.decoding is None or not self.decodes_in_fixed_shapes:
            return None
        return link.runtime.shared.of(DecodePlans).written(step, self.heads(output))

    def _add_decoded(
        self, link: CUDAAttentionLink, plans: FixedPlans, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Merge the public part into ``output``, by launches that are equal in all passes with equally many
        rows.  No launch depends on requests, and no statement waits for, copies or reads device memory."""
        assert KEPT.lse is not None, "the stock call left no log-sum-exp"
        plan = plans.plan(KEPT.lse.shape[1])
        self._merge_public(link, [SpanPiece(plan, slice(None))], query.to(output.dtype), output, KEPT.lse.t())

    def capture(
        self, link: CUDAAttentionLink, captured: CapturedRows, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        link.ops.capture_(
            key,
            value,
            link.public.key,
            link.public.value,
            captured.rows,
            captured.slots,
            captured.positions,
            link.table(),
            link.neox,
            link.public.key_scale,
            link.public.value_scale,
        )

    def add_public(
        self,
        link: CUDAAttentionLink,
        step: StepContext,
        public: PublicRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        private_lse = self.private_lse(link, query, kv_cache, metadata, step, public)
        query = query.to(output.dtype)
        pieces = span_pieces(link.runtime, step, public, self.heads(query), self.window())
        self._merge_public(link, pieces, query, output, private_lse)

    def replace(
        self,
        link: CUDAAttentionLink,
        replaced: ReplacedRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        query = query.to(output.dtype)
        runtime, heads = link.runtime, self.heads(query)
        step = runtime.step
        assert step is not None
        rows = replaced_rows(step, replaced)
        lses = [
            self._attend_private(link, piece, query, kv_cache, metadata, output, rows[piece.rows])
            for piece in private_pieces(step, replaced, metadata.block_table, heads)
        ]
        private_lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        pieces = span_pieces(runtime, step, replaced.public, heads, self.window(), replaced.hidden_columns)
        self._merge_public(link, pieces, query, output, private_lse)

    def _attend_private(
        self,
        link: CUDAAttentionLink,
        piece: SpanPiece,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write a piece's attention over vLLM's own cache to ``rows [n]`` int64 of ``output``.  Return the
        log-sum-exp ``[n, heads]`` float32.  Sinks count in both results."""
        scales = (1.0, 1.0) if link.scales is None else (link.scales.key, link.scales.value)
        halves, scale = self.halves(kv_cache), self.query_scale(link)
        out, lse = link.ops.attend(
            query, *halves, None, True, piece.plan, scale, metadata.block_table, *scales
        )
        if self.sinks is not None:
            total = torch.logaddexp(lse, self.sinks.float())
            out *= (lse - total).exp()[..., None]
            lse = total
        output.index_copy_(0, rows, out.to(output.dtype))
        return lse

    def _merge_public(
        self,
        link: CUDAAttentionLink,
        pieces: list[SpanPiece],
        query: torch.Tensor,
        output: torch.Tensor,
        private_lse: torch.Tensor,
    ) -> None:
        """Merge the public part into the pieces' rows of ``output``, in place.  ``private_lse``: log-sum-exp
        of the private part, ``[rows, heads]`` float32."""
        pool, scale = link.public, self.query_scale(link)
        given = query, pool.key, pool.value, link.table(), link.neox
        for piece in pieces:
            out, lse = link.ops.attend(*given, piece.plan, scale, None, pool.key_scale, pool.value_scale)
            link.ops.merge_rows_(output, private_lse[piece.rows], out, lse, piece.plan.token_rows)

    def heads(self, query: torch.Tensor) -> Heads:
        return self.num_heads, self.num_kv_heads, self.head_size, query.dtype

    def halves(self, kv_cache: torch.Tensor) -> list[torch.Tensor]:
        """Return views of K and V, each ``[blocks, block_size, kv_heads, size]``.  ``kv_cache [blocks,
        kv_heads, block_size, 2 * size]`` holds bytes of FP8 numbers if it is quantised."""
        if self.has_quantised_cache():
            kv_cache = kv_cache.view(FP8)
        halves = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return [canonicalize_singleton_dim_strides(half) for half in halves]

    def query_scale(self, link: CUDAAttentionLink) -> float:
        """Return the factor of the scores; with FP8, it includes the scale of the query."""
        return self.scale if link.scales is None else self.scale * link.scales.query

    def private_lse(
        self,
        link: CUDAAttentionLink,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        step: StepContext,
        public: PublicRows,
    ) -> torch.Tensor:
        """Return the log-sum-exp ``[rows, heads]`` float32 of attention over vLLM's cache, sinks included.

        ``query [tokens, heads, size]``; ``kv_cache [blocks, kv_heads, block_size, 2 * size]``.
        """
        if KEPT.lse is not None:
            # The copy is aligned, because Triton specialises launches on alignment.
            return columns_of(KEPT.lse, token_rows(step, public)).t()
        private = PrivateRows.of(step, public)
        key_cache, value_cache = self.halves(kv_cache)
        # No window argument: the window hides nothing from these rows, else `replace` would serve them.
        _, lse = flash_attn.flash_attn_varlen_func(
            q=rows_of(query, private.rows),
            k=key_cache,
            v=value_cache,
            cu_seqlens_q=private.starts,
            max_seqlen_q=private.longest_query,
            seqused_k=private.tokens,
            max_seqlen_k=private.longest_cache,
            softmax_scale=self.scale,
            causal=True,
            block_table=private.blocks(step, metadata.block_table),
            num_splits=1 if self.batch_invariant_enabled else 0,
            return_softmax_lse=True,
            fa_version=self.lse_version,
            **({} if link.scales is None else link.scales.descales(len(private.tokens), self.num_kv_heads)),
        )
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.float()[:, None])
        return lse.t()
