"""Multi-head latent attention (MLA) on CPU: stock kernels for plain rows, span attention for composed ones.

MLA (DeepSeek-V2, arXiv:2405.04434) keeps of each token a latent ``c [rank]``, which has no position, and one
rotated key ``k_pe [rope]`` that all heads share.  Head ``h`` has ``K = [W_UK c | k_pe]`` and ``V = W_UV c``.
With ``W_UK`` absorbed into the query that is attention over one KV head,

    q' = [q_pe | q_nope W_UK]      K' = [k_pe | c]      V' = c      out = W_UV (softmax(q' K'^T) V')

and a record's row is ``K'`` with its leading ``rope`` elements not rotated: what span attention takes, V'
being a part of K'.  The operators are given ``K'`` for V, and the part of their result that belongs to
``k_pe`` is left out.

Stock code runs over the whole batch, so plain rows have stock bits.  It returns no log-sum-exp, and prefills
with K and V of every head: rows that see public columns have their private part from vLLM's cache, too, in
the absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from ...pool.shared import OncePer
from ...pool.step import PublicRows
from ..ops import span_attention
from ..ops.span_attention import CacheColumns, PoolColumns
from ..ops.span_attention.torch import unrotate
from .base import AttentionLink, LinkedAttention

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    from ...pool.step import ComposedRow, StepContext

    class MLAImpl:
        """What both stock implementations have."""

        head_size: int
        kv_lora_rank: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        scale: float
        kv_cache_dtype: str
        indexer: object | None

        def do_kv_cache_update(self, *args: Any) -> None: ...
        def forward_mqa(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]: ...
        def forward_mha(self, *args: Any, **kwargs: Any) -> None: ...
else:
    MLAImpl = object


@dataclass(frozen=True)
class LatentLink(AttentionLink):
    """``layer``: vLLM's module, which has the up-projections; ``index [block_size, 1, head_size]`` int32:
    where ``[k_pe | c]`` lies in a block of vLLM's cache, whose rows are ``[c | k_pe]``; ``ops``: the
    operators of ``ops.span_attention``."""

    layer: Any
    index: torch.Tensor
    ops: ModuleType


@dataclass(frozen=True)
class LatentRows:
    """The rows of one stock call that see public columns: ``rows [n]`` of the call, and ``public``, whose
    ranges count these alone and whose block tables are those of the call's requests."""

    rows: torch.Tensor
    public: PublicRows

    @staticmethod
    def of(composed: Sequence[ComposedRow], first_row: int, first_request: int) -> LatentRows | None:
        """``first_row``, ``first_request``: of the batch, where the call begins."""
        if not composed:
            return None
        public = PublicRows.of(composed)
        spans = [(c.row.q0 - first_row, c.row.q1 - first_row) for c in composed]
        rows = torch.cat([torch.arange(*span) for span in spans])
        ends = torch.tensor([last - first for first, last in spans]).cumsum(0)
        ranges = public.cache_ranges.clone()
        ranges[:, 0], ranges[:, 1] = torch.nn.functional.pad(ends[:-1], (1, 0)), ends
        ranges[:, 2] -= first_request
        compact = replace(public, cache_ranges=ranges)
        return LatentRows(rows, compact)


class _OfStep(OncePer):
    """:class:`LatentRows` of a pass, by the stock call."""


class LatentAttention(LinkedAttention[LatentLink], MLAImpl):
    """Mixin before a stock implementation; with a link, also captures segments and reads public rows."""

    def connect(self, layer: Any, link: AttentionLink) -> None:
        block_size, size = layer.kv_cache.shape[1:]
        order = [*range(self.kv_lora_rank, size), *range(self.kv_lora_rank)]
        index = torch.arange(block_size)[:, None, None] * size + torch.tensor(order)
        ops = span_attention.choose(self.head_size, link.public.key.device.type)
        self.link = LatentLink(link.runtime, link.public, link.rope, layer, index.int(), ops)

    def refusal(self) -> str | None:
        if self.indexer is not None:
            return "sparse attention (MLA with an indexer)"
        if self.head_size not in (sizes := CPUMLABackend.get_supported_head_sizes()):
            return f"latent attention with rows of {self.head_size} (vLLM's kernels for CPUs have {sizes})"
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            return f"quantised KV cache ({self.kv_cache_dtype})"
        return None

    def watch(self, layer: Any, tell: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Told of ``k_pe [tokens, 1, rope]``, all of K that may depend on positions."""

        def before(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
            tell(inputs[2].clone())

        end: Callable[[], None] = layer.register_forward_pre_hook(before).remove
        return end

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *args: Any) -> None:
        """As stock; copies interior rows of segment requests into the pool, their ``k_pe`` with its rotation
        undone."""
        super().do_kv_cache_update(kv_c_normed, k_pe, *args)
        link = self.link
        if link is None or (step := link.runtime.step) is None or (captured := step.captured) is None:
            return
        link.runtime.calls["capture_kv"] += 1
        key = unrotate(k_pe.index_select(0, captured.rows), link.table(), captured.positions, link.neox)
        latent = kv_c_normed.index_select(0, captured.rows)[:, None]
        link.public.key.index_copy_(0, captured.slots, torch.cat([key, latent], -1))

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Stock's prefill; rows that see public columns are then computed again, in the absorbed form.

        ``q [rows, heads, nope + rope]``, rotated; ``output [rows, heads * value size]``: of the pass's
        requests of more than one row.
        """
        super().forward_mha(
            q, kv_c_normed, k_pe, kv_cache, attn_metadata, k_scale, output=output, output_scale=output_scale
        )
        prefill = attn_metadata.prefill
        assert prefill is not None
        if (found := self._composed(attn_metadata, of_decode=False)) is None:
            return
        link, here = found
        nope, pe = q.index_select(0, here.rows).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        absorbed = torch.cat([pe, self.absorbed(link.layer, nope)], -1)
        latent = self._latent(link, here, absorbed, kv_cache, prefill.block_table)
        joined = output.new_empty(len(latent), output.shape[1])
        link.layer._v_up_proj(latent, out=joined)
        output.index_copy_(0, here.rows, joined)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stock's decode; rows that see public columns are then computed again.

        ``q [rows, heads, rank + rope]``, absorbed and rotated, or its two parts: of the pass's requests of
        one row.  Returns the latents ``[rows, heads, rank]`` and stock's log-sum-exp of the private part:
        decode context parallelism alone reads that.
        """
        output, lse = super().forward_mqa(q, kv_cache, attn_metadata, layer)
        decode = attn_metadata.decode
        assert decode is not None
        if (found := self._composed(attn_metadata, of_decode=True)) is None:
            return output, lse
        link, here = found
        nope, pe = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        absorbed = torch.cat([pe.index_select(0, here.rows), nope.index_select(0, here.rows)], -1)
        latent = self._latent(link, here, absorbed, kv_cache, decode.block_table)
        output.index_copy_(0, here.rows, latent.to(output.dtype))
        return output, lse

    def absorbed(self, layer: Any, nope: torch.Tensor) -> torch.Tensor:
        """``q_nope W_UK``: ``[rows, heads, nope]`` -> ``[rows, heads, rank]``."""
        raise NotImplementedError

    def _composed(
        self, metadata: MLACommonMetadata, *, of_decode: bool
    ) -> tuple[LatentLink, LatentRows] | None:
        """The rows of one of the two stock calls of a pass that see public columns.

        vLLM's batch has the requests of one row first."""
        link = self.link
        if link is None or (step := link.runtime.step) is None:
            return None
        here = step.shared.of(_OfStep)(step, of_decode, lambda: _rows_of(step, metadata, of_decode))
        if here is None:
            return None
        link.runtime.calls["span_attention"] += 1
        return link, here

    def _latent(
        self,
        link: LatentLink,
        here: LatentRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of rows ``query [n, heads, rope + rank]`` over the request's own latents and public ones:
        ``[n, heads, rank]`` of the query's dtype."""
        public, latents = here.public, link.public.key
        pool = PoolColumns(
            latents,
            latents,
            public.slot_mapping,
            public.kv_positions,
            link.table(),
            link.neox,
            public.visible_kv_lens,
        )
        cache = CacheColumns(kv_cache, link.index, link.index, block_table)
        joined = torch.empty_like(query)
        link.ops.join_(joined, query, public.cache_ranges, self.scale, pool, cache)
        return joined[..., self.qk_rope_head_dim :]


def _rows_of(step: StepContext, metadata: MLACommonMetadata, of_decode: bool) -> LatentRows | None:
    first = metadata.num_decode_tokens
    seeing = [c for c in step.reading if c.max_visible_kv_len and (c.row.q0 < first) == of_decode]
    return LatentRows.of(seeing, 0 if of_decode else first, 0 if of_decode else metadata.num_decodes)


class HypicCPUMLAImpl(LatentAttention, CPUMLAImpl):
    """vLLM's reference implementation, for any dtype and CPU, with public rows."""

    def absorbed(self, layer: Any, nope: torch.Tensor) -> torch.Tensor:
        return torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)


class HypicAMXMLAImpl(LatentAttention, AMXMLAImpl):
    """vLLM's implementation for CPUs with AMX, bf16, with public rows."""

    def absorbed(self, layer: Any, nope: torch.Tensor) -> torch.Tensor:
        rows, heads, _ = nope.shape
        found = nope.new_empty(rows, heads, self.kv_lora_rank)
        _custom_ops.bmm_cpu(
            found.transpose(0, 1), nope.transpose(0, 1), self._w_uk_packed, True, self._w_scale
        )
        return found


class HypicCPUMLABackend(CPUMLABackend):
    """vLLM's reference MLA backend for CPUs with a public part."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicCPUMLAImpl]:
        return HypicCPUMLAImpl


class HypicAMXMLABackend(AMXMLABackend):
    """vLLM's MLA backend for CPUs with AMX with a public part."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicAMXMLAImpl]:
        return HypicAMXMLAImpl
