"""Attention backend on CPU: stock kernels for everything private, span attention for the public part."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from ..ops import span_attention
from ..ops.span_attention.torch import unrotate
from .base import AttentionLink, PublicAttention
from .private_kv import cache_index, in_lines

if TYPE_CHECKING:
    from ...pool.step import CapturedRows, PublicRows, StepContext, WindowedRows


class HypicCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with a public part."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicCPUAttentionImpl]:
        return HypicCPUAttentionImpl


@dataclass(frozen=True)
class CPUAttentionLink(AttentionLink):
    """``key_index``, ``value_index [block_size, kv_heads, head_size]`` int32: where K and V lie in a block of
    vLLM's cache, ``in_lines`` or not; ``ops``: the operators of ``ops.span_attention`` that serve this
    layer."""

    key_index: torch.Tensor
    value_index: torch.Tensor
    in_lines: bool
    ops: ModuleType


class HypicCPUAttentionImpl(PublicAttention[CPUAttentionLink], CPUAttentionBackendImpl):
    """Stock CPU attention; with a link, also captures segments and reads public K and V."""

    serves_soft_caps = True
    serves_shared_kv = True

    def connect(self, layer: Any, link: AttentionLink) -> None:
        key, value = (cache_index(layer.kv_cache, layer.isa, of_value=v) for v in (False, True))
        ops = span_attention.choose(self.head_size, link.public.key.device.type)
        lines = in_lines(key, value)
        self.link = CPUAttentionLink(link.runtime, link.public, link.rope, key, value, lines, ops)

    def window(self) -> int | None:
        return None if self.sliding_window == -1 else self.sliding_window

    def has_quantised_cache(self) -> bool:
        return bool(self.is_fp8_kv_cache)

    def capture(
        self, link: CPUAttentionLink, captured: CapturedRows, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = captured.rows
        raw = unrotate(key.index_select(0, rows), link.table(), captured.positions, link.neox)
        link.public.key.index_copy_(0, captured.slots, raw)
        link.public.value.index_copy_(0, captured.slots, value.index_select(0, rows))

    def add_public(
        self,
        link: CPUAttentionLink,
        step: StepContext,
        public: PublicRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        out, lse = link.ops.span_attention(
            query,
            link.public.key,
            link.public.value,
            public.slot_mapping,
            public.kv_positions,
            link.table(),
            link.neox,
            public.visible_kv_lens,
            public.query_ranges,
            self.scale,
            soft_cap=self.logits_soft_cap,
        )
        private_lse = link.ops.cache_lse(
            query,
            kv_cache,
            link.key_index,
            metadata.block_table,
            public.cache_ranges,
            self.scale,
            self.logits_soft_cap,
            link.in_lines,
        )
        # Stock counted the sinks in the private part: there they stay, once.
        link.ops.merge_(output, self._with_sinks(private_lse), out, lse, public.query_ranges)

    def attend_within(
        self,
        link: CPUAttentionLink,
        windowed: WindowedRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        public = windowed.public
        out, lse = link.ops.span_attention(
            query,
            link.public.key,
            link.public.value,
            public.slot_mapping,
            public.kv_positions,
            link.table(),
            link.neox,
            public.visible_kv_lens,
            public.query_ranges,
            self.scale,
            windowed.hidden_columns,
            self.logits_soft_cap,
        )
        private, private_lse = link.ops.cache_attention(
            query,
            kv_cache,
            link.key_index,
            link.value_index,
            metadata.block_table,
            public.cache_ranges,
            self.scale,
            windowed.hidden_tokens,
            self.logits_soft_cap,
            link.in_lines,
        )
        total = self._with_sinks(private_lse)
        if self.sinks is not None:
            private *= (private_lse - total).exp()[..., None]
        output.index_copy_(0, windowed.rows, private.to(output.dtype))
        link.ops.merge_(output, total, out, lse, public.query_ranges)

    def _with_sinks(self, lse: torch.Tensor) -> torch.Tensor:
        """Log-sum-exp ``[rows, heads]`` with the layer's sinks among the scores."""
        return lse if self.sinks is None else torch.logaddexp(lse, self.sinks.float())
