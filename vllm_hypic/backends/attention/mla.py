"""Multi-head latent attention (MLA) on CPU: stock kernels for plain rows, span attention for composed rows.

Span attention treats the rows ``K' = [k_pe | c]`` as one ordinary KV head.  The operators also take ``K'`` as
V; the caller drops the part of their result that belongs to ``k_pe``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from ...pool.step import PublicRows
from ..ops import span_attention
from ..ops.span_attention import CacheColumns, PoolColumns
from ..ops.span_attention.eager import unrotate
from .base import AttentionLink
from .latents import LatentAttention, LatentLink, LatentRows


@dataclass(frozen=True)
class CPULatentLink(LatentLink):
    """The link of one MLA layer on CPU.

    ``index [block_size, 1, head_size]`` int32: offsets of ``[k_pe | c]`` in a block of vLLM's cache, whose
    rows are ``[c | k_pe]``.  ``ops``: the operators of ``ops.span_attention``."""

    index: torch.Tensor
    ops: ModuleType


class CPULatentAttention(LatentAttention[CPULatentLink, PublicRows]):
    """Mixin before a stock CPU implementation; it captures segments when vLLM's cache is written."""

    def connect(self, layer: Any, link: AttentionLink) -> None:
        block_size, size = layer.kv_cache.shape[1:]
        order = [*range(self.kv_lora_rank, size), *range(self.kv_lora_rank)]
        index = torch.arange(block_size)[:, None, None] * size + torch.tensor(order)
        ops = span_attention.choose(self.head_size, link.public.key.device.type)
        self.link = CPULatentLink(link.runtime, link.public, link.rope, layer, index.int(), ops)

    def refusal(self, layer: Any) -> str | None:
        if (reason := super().refusal(layer)) is not None:
            return reason
        if self.head_size not in (sizes := CPUMLABackend.get_supported_head_sizes()):
            return f"latent attention with rows of {self.head_size} (vLLM's kernels for CPUs have {sizes})"
        return None

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *args: Any) -> None:
        """Write vLLM's cache by stock code, then copy interior rows of segment requests into the pool, with
        ``k_pe`` unrotated."""
        super().do_kv_cache_update(kv_c_normed, k_pe, *args)
        link = self.link
        if link is None or (step := link.runtime.step) is None or (captured := step.captured) is None:
            return
        link.runtime.calls["capture_kv"] += 1
        key = unrotate(k_pe.index_select(0, captured.rows), link.table(), captured.positions, link.neox)
        latent = kv_c_normed.index_select(0, captured.rows)[:, None]
        link.public.key.index_copy_(0, captured.slots, torch.cat([key, latent], -1))

    def pieces(
        self, link: CPULatentLink, here: LatentRows, block_table: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, PublicRows]]:
        return [(here.rows, here.public)]

    def latent(
        self,
        link: CPULatentLink,
        piece: PublicRows,
        nope: torch.Tensor,
        pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        latents = link.public.key
        pool = PoolColumns(
            latents,
            latents,
            piece.slot_mapping,
            piece.kv_positions,
            link.table(),
            link.neox,
            piece.visible_kv_lens,
        )
        cache = CacheColumns(kv_cache, link.index, link.index, block_table)
        query = torch.cat([pe, nope], -1)
        joined = torch.empty_like(query)
        link.ops.join_(joined, query, piece.cache_ranges, self.scale, pool, cache)
        return joined[..., self.qk_rope_head_dim :]


class HypicCPUMLAImpl(CPULatentAttention, CPUMLAImpl):
    """vLLM's reference implementation, for any dtype and CPU, plus attention over records."""


class HypicAMXMLAImpl(CPULatentAttention, AMXMLAImpl):
    """vLLM's bf16 implementation for CPUs with AMX, plus attention over records."""

    def absorbed(self, layer: Any, nope: torch.Tensor) -> torch.Tensor:
        rows, heads, _ = nope.shape
        found = nope.new_empty(rows, heads, self.kv_lora_rank)
        _custom_ops.bmm_cpu(
            found.transpose(0, 1), nope.transpose(0, 1), self._w_uk_packed, True, self._w_scale
        )
        return found


class HypicCPUMLABackend(CPUMLABackend):
    """vLLM's reference MLA backend for CPUs, plus attention over records."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicCPUMLAImpl]:
        return HypicCPUMLAImpl


class HypicAMXMLABackend(AMXMLABackend):
    """vLLM's MLA backend for CPUs with AMX, plus attention over records."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicAMXMLAImpl]:
        return HypicAMXMLAImpl
