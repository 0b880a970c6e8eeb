"""Attention of a layer under PIC: the code that the backends of all platforms share.

The stock kernel runs over the whole batch, unchanged, except in passes where every row is replaced
(:class:`~vllm_hypic.pool.step.AttentionRows`).  For composed rows that are not replaced, the stock result is
the private part.  Span attention computes the public part from the pool, and log-sum-exp merges both parts.
Segment requests run stock; :meth:`PublicAttention.capture` copies their V and unrotated K into the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import CapturedRows, PublicRows, ReplacedRows, StepContext
    from ...pool.tensors import PublicKV
    from ..rope import RopeTap


@dataclass(frozen=True)
class AttentionLink:
    """The parts of PIC that one attention layer uses: runtime, pool tensors and rotary embedding.

    ``rope``: the embedding that the start-up probe finds; ``None`` for NoPE layers.
    """

    runtime: HypicRuntime
    public: PublicKV
    rope: RopeTap | None

    def table(self) -> torch.Tensor | None:
        """Return the layer's cos/sin table ``[positions, rotary_dim]``, mscale included; ``None``: NoPE."""
        return None if self.rope is None else self.rope.cos_sin_cache  # type: ignore[attr-defined]

    @property
    def neox(self) -> bool:
        return self.rope is None or bool(getattr(self.rope, "is_neox_style", True))


LinkT = TypeVar("LinkT", bound=AttentionLink)

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl
else:
    AttentionImpl = object


class LinkedAttention(Generic[LinkT]):
    """Mixin that stands before a stock implementation and lets its layers take part in PIC."""

    head_size: int
    link: LinkT | None = None
    """The link that start-up sets; ``None`` runs stock code.  Layers with one KV cache share one link."""

    def connect(self, layer: Any, link: AttentionLink) -> None:
        """Make the layer take part in PIC from now on.  ``layer``: the module, with an allocated KV cache."""
        raise NotImplementedError

    def refusal(self, layer: Any) -> str | None:
        """Return why the layer cannot take part in PIC, or ``None``.

        ``layer``: the module that this implementation serves; its cache need not be allocated yet.
        """
        raise NotImplementedError

    def watch(self, layer: Any, tell: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Call ``tell`` with the K that reaches ``layer``, in passes without attention metadata outside
        compiled graphs.  Return a function that ends this."""
        raise NotImplementedError


class PublicAttention(LinkedAttention[LinkT], AttentionImpl):
    """Mixin before a stock implementation; with a link, it captures segments and reads public K and V."""

    hypic_probe: Callable[[torch.Tensor | None], None] | None = None
    """Function that receives the K of this layer while the start-up probe runs."""

    def watch(self, layer: Any, tell: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        self.hypic_probe = tell

        def end() -> None:
            self.hypic_probe = None

        return end

    def window(self) -> int | None:
        """Return the sliding window in tokens; ``None`` without a window."""
        raise NotImplementedError

    def has_quantised_cache(self) -> bool:
        raise NotImplementedError

    def rescale(self, layer: Any) -> None:
        """Read a quantised cache with the scales that ``layer`` has now, as vLLM's own kernels do."""
        raise NotImplementedError

    short = 0
    """Most tokens in vLLM's cache with which a request that decodes is served without the stock kernel."""
    serves_soft_caps = False
    """Whether PIC serves layers whose scores have a soft-cap."""
    serves_quantised_cache = False
    serves_shared_kv = False
    """Whether PIC serves layers that read another layer's KV cache and have no K and V themselves."""

    def refusal(self, layer: Any) -> str | None:
        if self.logits_soft_cap and not self.serves_soft_caps:
            return f"logits soft-cap {self.logits_soft_cap}"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.kv_sharing_target_layer_name is not None and not self.serves_shared_kv:
            return f"KV shared with layer {self.kv_sharing_target_layer_name}"
        if self.has_quantised_cache() and not self.serves_quantised_cache:
            return f"quantised KV cache ({self.kv_cache_dtype})"
        return None

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
        if attn_metadata is None and self.hypic_probe is not None:
            self.hypic_probe(None if key is None else key.clone())
            return output.zero_()
        link = self.link
        step = None if link is None or attn_metadata is None else link.runtime.step
        rows = None if step is None else step.attention_rows(self.window(), self.short)
        if rows is None or not rows.all_replaced:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if link is None or step is None or rows is None:
            return output
        if step.captured is not None and self.kv_sharing_target_layer_name is None:
            assert key is not None and value is not None
            link.runtime.calls["capture_kv"] += 1
            self.capture(link, step.captured, key, value)
        if rows.replaced is not None:
            link.runtime.calls["span_attention"] += 1
            self.replace(link, rows.replaced, query, kv_cache, attn_metadata, output)
        if rows.merged is not None:
            link.runtime.calls["span_attention"] += 1
            self.add_public(link, step, rows.merged, query, kv_cache, attn_metadata, output)
        return output

    def capture(self, link: LinkT, captured: CapturedRows, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copy the interior rows of segment requests into the pool, with K unrotated.

        ``key``, ``value``: ``[tokens, kv_heads, head_size]``, K rotated.
        """
        raise NotImplementedError

    def add_public(
        self,
        link: LinkT,
        step: StepContext,
        public: PublicRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Merge the public part into the rows of ``output`` that ``public`` names, in place."""
        raise NotImplementedError

    def replace(
        self,
        link: LinkT,
        replaced: ReplacedRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Write private and public part to the rows of ``output`` that stock does not serve, in place."""
        raise NotImplementedError
