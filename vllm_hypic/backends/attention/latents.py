"""Multi-head latent attention (MLA) under PIC: the code that the backends of all platforms share.

MLA (DeepSeek-V2, arXiv:2405.04434) keeps two vectors per token: a latent ``c [rank]`` without position, and a
rotated key ``k_pe [rope]`` that all heads share.  Head ``h`` has ``K = [W_UK c | k_pe]`` and ``V = W_UV c``.
With ``W_UK`` absorbed into the query, MLA is attention over one KV head,

    q' = [q_pe | q_nope W_UK]      K' = [k_pe | c]      V' = c      out = W_UV (softmax(q' K'^T) V')

and a record's row is ``K'`` with its leading ``rope`` elements unrotated.

Stock code runs over the whole batch, so plain rows get stock bits.  Some stock kernels return no log-sum-exp,
and stock prefill uses K and V of every head.  Rows that see public columns are therefore computed again, in
the absorbed form, over vLLM's cache and the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from ...pool.shared import OncePer
from ...pool.step import PublicRows
from .base import AttentionLink, LinkedAttention

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    from ...pool.step import ComposedRow, StepContext

    class MLAImpl:
        """The attributes and methods that all stock implementations have."""

        num_heads: int
        head_size: int
        kv_lora_rank: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
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
    """The link of one MLA layer.  ``layer``: vLLM's module, which has the up-projections."""

    layer: Any


@dataclass(frozen=True)
class LatentRows:
    """The rows of one stock call that see public columns.

    ``rows [n]`` int64: row numbers in the call.  ``public``: their public columns, with ranges that count
    these rows alone and index the call's block table.  ``of_decode``: the call serves requests with few rows.
    """

    rows: torch.Tensor
    public: PublicRows
    of_decode: bool = False

    @staticmethod
    def of(composed: Sequence[ComposedRow], first_row: int, first_request: int) -> LatentRows | None:
        """Return the rows of ``composed``, on the host; ``None`` without any.

        ``first_row``, ``first_request``: the batch's token row and request at which the stock call begins."""
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
    """:class:`LatentRows` of a pass, one for each stock call."""


LatentLinkT = TypeVar("LatentLinkT", bound=LatentLink)
PieceT = TypeVar("PieceT")


class LatentAttention(LinkedAttention[LatentLinkT], Generic[LatentLinkT, PieceT], MLAImpl):
    """Mixin before a stock implementation; with a link, it computes rows that see public columns again.

    ``PieceT``: the type that describes the rows of one call to a platform's operator.
    """

    def refusal(self, layer: Any) -> str | None:
        forward = getattr(type(layer), "forward_impl", None)
        if forward is not MLAAttention.forward_impl:
            return f"{type(layer).__name__} (the model's own latent attention)"
        if self.indexer is not None:
            return "sparse attention (MLA with an indexer)"
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            return f"quantised KV cache ({self.kv_cache_dtype})"
        return None

    def watch(self, layer: Any, tell: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Call ``tell`` with ``k_pe [tokens, 1, rope]``, the only part of K that may depend on positions.
        Return a function that ends this."""

        def before(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
            tell(inputs[2].clone())

        end: Callable[[], None] = layer.register_forward_pre_hook(before).remove
        return end

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
        """Run stock prefill into ``output``, then compute rows that see public columns again, absorbed.

        ``q [rows, heads, nope + rope]``, rotated, and ``output [rows, heads * value size]`` hold the rows of
        the pass's requests with many rows.
        """
        self.before(kv_cache, attn_metadata)
        super().forward_mha(
            q, kv_c_normed, k_pe, kv_cache, attn_metadata, k_scale, output=output, output_scale=output_scale
        )
        prefill = attn_metadata.prefill
        assert prefill is not None
        if (found := self._composed(attn_metadata, of_decode=False)) is None:
            return
        link, here = found
        for rows, piece in self.pieces(link, here, prefill.block_table):
            nope, pe = q.index_select(0, rows).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            nope = self.absorbed(link.layer, nope)
            latent = self.latent(link, piece, nope, pe, kv_cache, prefill.block_table)
            joined = output.new_empty(len(latent), output.shape[1])
            link.layer._v_up_proj(latent, out=joined)
            output.index_copy_(0, rows, joined)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run stock decode, then compute rows that see public columns again.

        ``q [rows, heads, rank + rope]``, absorbed and rotated, or its two parts: the rows of the pass's
        requests with few rows, on CPUs with one row.  Returns the latents ``[rows, heads, rank]`` and stock's
        log-sum-exp of the private part, which only decode context parallelism reads.
        """
        # vLLM calls `forward_mha` first if the pass has prefills; that call has then run `before`.
        if attn_metadata.num_actual_tokens == attn_metadata.num_decode_tokens:
            self.before(kv_cache, attn_metadata)
        output, lse = super().forward_mqa(q, kv_cache, attn_metadata, layer)
        decode = attn_metadata.decode
        assert decode is not None
        if (found := self._composed(attn_metadata, of_decode=True)) is None:
            return output, lse
        link, here = found
        nope, pe = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        for rows, piece in self.pieces(link, here, decode.block_table):
            given = nope.index_select(0, rows), pe.index_select(0, rows)
            latent = self.latent(link, piece, *given, kv_cache, decode.block_table)
            output.index_copy_(0, rows, latent.to(output.dtype))
        return output, lse

    def before(self, kv_cache: torch.Tensor, metadata: MLACommonMetadata) -> None:
        """Run platform code once per pass, after vLLM has cached its latents and before any attention."""

    def absorbed(self, layer: Any, nope: torch.Tensor) -> torch.Tensor:
        """Return ``q_nope W_UK``: ``[rows, heads, nope]`` -> ``[rows, heads, rank]``."""
        return torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)

    def pieces(
        self, link: LatentLinkT, here: LatentRows, block_table: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, PieceT]]:
        """Divide ``here`` into pairs of rows ``[n]`` of the stock call and the piece for :meth:`latent`."""
        raise NotImplementedError

    def latent(
        self,
        link: LatentLinkT,
        piece: PieceT,
        nope: torch.Tensor,
        pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention of a piece's rows over private and public latents, ``[n, heads, rank]``.  ``nope
        [n, heads, rank]``, absorbed, and ``pe [n, heads, rope]``: the query, with the dtype of the result."""
        raise NotImplementedError

    def _composed(
        self, metadata: MLACommonMetadata, *, of_decode: bool
    ) -> tuple[LatentLinkT, LatentRows] | None:
        """Return the link and the rows that see public columns in one of the two stock calls, or ``None``.

        ``of_decode`` selects the decode call, whose requests come first in vLLM's batch."""
        link = self.link
        if link is None or (step := link.runtime.step) is None:
            return None
        here = step.shared.of(_OfStep)(step, of_decode, lambda: _rows_of(step, metadata, of_decode))
        if here is None:
            return None
        link.runtime.calls["span_attention"] += 1
        return link, here


def _rows_of(step: StepContext, metadata: MLACommonMetadata, of_decode: bool) -> LatentRows | None:
    first = metadata.num_decode_tokens
    seeing = [c for c in step.reading if c.max_visible_kv_len and (c.row.q0 < first) == of_decode]
    found = LatentRows.of(seeing, 0 if of_decode else first, 0 if of_decode else metadata.num_decodes)
    if found is None:
        return None
    return replace(found, rows=step.on_device(found.rows.numpy())[0], of_decode=of_decode)
