"""Attention backend on CPU: stock kernels for everything private, span attention for the public part.

The stock kernel runs over the whole batch, unchanged.  For a composed row its result is the private
part; the public part comes from the pool and both merge by log-sum-exp.  Segment requests run stock
and have their V, and their K with its rotation undone, copied into the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from .ops.span_attention.torch_ops import unrotate

if TYPE_CHECKING:
    from ..connector.pool import PublicKV
    from ..connector.runtime import HypicRuntime
    from ..connector.step import PublicRows, StepContext
    from .rope import RopeTap


class HypicAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with a public part."""

    @staticmethod
    def get_name() -> str:
        return "HYPIC"

    @staticmethod
    def get_impl_cls() -> type[HypicAttentionImpl]:
        return HypicAttentionImpl


@dataclass(frozen=True)
class AttentionLink:
    """What one attention layer needs for PIC, found by the start-up probe.

    ``rope`` is ``None`` for NoPE layers; ``key_index [block_size, kv_heads, head_size]`` int32: where K lies
    in a block of vLLM's cache; ``ops``: the operators of ``ops.span_attention`` that serve this layer.
    """

    runtime: HypicRuntime
    public: PublicKV
    rope: RopeTap | None
    key_index: torch.Tensor
    ops: ModuleType

    def table(self) -> torch.Tensor | None:
        """The layer's cos/sin table ``[positions, rotary_dim]``, mscale included."""
        return None if self.rope is None else self.rope.cos_sin_cache  # type: ignore[attr-defined]

    @property
    def neox(self) -> bool:
        return self.rope is None or bool(getattr(self.rope, "is_neox_style", True))


class HypicAttentionImpl(CPUAttentionBackendImpl):
    """Stock CPU attention; with a link, also captures segments and reads public K and V."""

    link: AttentionLink | None = None
    """Set at start-up; ``None``: stock."""
    hypic_probe: Callable[[torch.Tensor], None] | None = None
    """While probing: told the K that reached this layer."""

    def refusal(self) -> str | None:
        """Why this layer cannot take part in PIC, or ``None``."""
        if self.sliding_window != -1:
            return f"sliding window of {self.sliding_window} tokens"
        if self.logits_soft_cap:
            return f"logits soft-cap {self.logits_soft_cap}"
        if self.sinks is not None:
            return "learned attention sinks"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.kv_sharing_target_layer_name is not None:
            return f"KV shared with layer {self.kv_sharing_target_layer_name}"
        if self.is_fp8_kv_cache:
            return f"quantised KV cache ({self.kv_cache_dtype})"
        return None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same contract as the stock implementation."""
        if attn_metadata is None and self.hypic_probe is not None:
            self.hypic_probe(key.clone())
            return output.zero_()
        super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        link = self.link
        if link is None or link.runtime.step is None or attn_metadata is None:
            return output
        step = link.runtime.step
        if step.capture_rows is not None:
            self._capture(link, step, key, value)
        if step.public is not None:
            self._add_public(link, step.public, query, kv_cache, attn_metadata, output)
        return output

    @staticmethod
    def _capture(link: AttentionLink, step: StepContext, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copy interior rows of segment requests into the pool, K with its rotation undone.

        ``key``, ``value [tokens, kv_heads, head_size]``, K rotated.
        """
        link.runtime.calls["capture_kv"] += 1
        rows, slots, positions = step.capture_rows, step.capture_slots, step.capture_positions
        raw = unrotate(key.index_select(0, rows), link.table(), positions, link.neox)
        link.public.key.index_copy_(0, slots, raw)
        link.public.value.index_copy_(0, slots, value.index_select(0, rows))

    def _add_public(
        self,
        link: AttentionLink,
        public: PublicRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Merge the public part into ``output`` of all composed rows, in place."""
        link.runtime.calls["span_attention"] += 1
        out, lse = link.ops.span_attention(
            query,
            link.public.key,
            link.public.value,
            public.column_slots,
            public.column_positions,
            link.table(),
            link.neox,
            public.visible,
            public.bounds,
            self.scale,
        )
        private_lse = link.ops.cache_lse(
            query, kv_cache, link.key_index, metadata.block_table, public.cache_bounds, self.scale
        )
        link.ops.merge_(output, private_lse, out, lse, public.bounds)
