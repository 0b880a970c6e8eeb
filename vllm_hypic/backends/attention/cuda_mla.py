"""Multi-head latent attention (MLA) on CUDA: vLLM's own backend serves plain rows, Triton composed rows.

vLLM chooses the MLA backend (``patches/cuda_backend_choice.py``).  This module derives its classes from the
chosen backend, so plain rows get that backend's bits.  Every served backend stores one row ``[c | k_pe]`` per
token.  Two backends run short prefills in the decode call, so both stock calls may have composed rows.

Segments are captured from vLLM's cache after vLLM has written their rows there.  The code that writes the
cache may run inside a CUDA graph, in which no code of the plugin runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...errors import ConfigError
from ...pool.shared import OncePer
from .base import AttentionLink
from .cuda_rows import FLOAT_BYTES, PARTIAL_BYTES, LatentPiece, latent_pieces
from .latents import LatentAttention, LatentLink, LatentRows

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
    from vllm.v1.attention.backend import AttentionBackend

PREFIX = "Hypic"
"""The prefix that turns the name of a class of vLLM into the name of our subclass."""


def __getattr__(name: str) -> type[AttentionBackend]:
    """Return the backend of this name, made at the first access: some backends do not load on every GPU."""
    if name.startswith(PREFIX):
        for backend in AttentionBackendEnum:
            if str(backend.value).rpartition(".")[2] == name.removeprefix(PREFIX):
                return backend_of(backend)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def backend_of(stock: AttentionBackendEnum) -> type[AttentionBackend]:
    """Return a subclass of vLLM's backend that also attends to records.

    The subclass keeps ``get_name``, by which vLLM tells what a backend supports.  Its builder restricts full
    CUDA graphs to decode passes (see :class:`~.cuda.HypicFlashAttentionMetadataBuilder`).
    """
    backend: Any = stock.get_class()
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()

    def made(bases: tuple[type, ...], **attributes: object) -> Any:
        return type(f"{PREFIX}{bases[-1].__name__}", bases, {"__module__": __name__, **attributes})

    support = min(
        builder._cudagraph_support, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value
    )
    our_impl = made((CUDALatentAttention, impl))
    our_builder = made((builder,), _cudagraph_support=support)
    ours: type[AttentionBackend] = made(
        (backend,),
        get_impl_cls=staticmethod(lambda: our_impl),
        get_builder_cls=staticmethod(lambda: our_builder),
    )
    return ours


@dataclass(frozen=True)
class CUDALatentLink(LatentLink):
    """The link of one MLA layer on CUDA.  ``ops``: the module ``ops.span_attention.triton.latents``."""

    ops: ModuleType


class _Captured(OncePer):
    """Token slots of vLLM's cache that a pass captures, shared by all layers with one slot mapping."""


class CUDALatentAttention(LatentAttention[CUDALatentLink, LatentPiece]):
    """Mixin before a stock implementation; with a link, it also captures segments."""

    def connect(self, layer: Any, link: AttentionLink) -> None:
        from ..ops.span_attention.triton import latents

        cache = layer.kv_cache
        if cache.dim() != 3 or cache.shape[2] != self.head_size or cache.dtype != link.public.key.dtype:
            found = f"{tuple(cache.shape)} {cache.dtype}"
            wanted = f"[blocks, block_size, {self.head_size}] {link.public.key.dtype}"
            raise ConfigError(f"hypic: the KV cache of latent attention is {found}: expected {wanted}")
        latents.warm_up(self.num_heads, self.qk_rope_head_dim, link.table(), link.neox, cache)
        self.link = CUDALatentLink(link.runtime, link.public, link.rope, layer, latents)

    def refusal(self, layer: Any) -> str | None:
        from ..ops.span_attention.triton import latents

        return super().refusal(layer) or latents.refuses(self.kv_lora_rank, self.qk_rope_head_dim)

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        """Return ``False``: our operators write composed rows in the model's dtype."""
        return False

    def scratch_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Return the bytes that a pass of at most ``rows`` token rows in ``dtype`` takes beside the pool."""
        return PARTIAL_BYTES if rows else 0

    def before(self, kv_cache: torch.Tensor, metadata: MLACommonMetadata) -> None:
        """Copy interior rows of segment requests from vLLM's cache into the pool, with ``k_pe`` unrotated."""
        link = self.link
        if link is None or (step := link.runtime.step) is None or (captured := step.captured) is None:
            return
        link.runtime.calls["capture_kv"] += 1
        places = metadata.slot_mapping
        tokens = step.shared.of(_Captured)(places, "tokens", lambda: places.index_select(0, captured.rows))
        given = tokens, captured.slots, captured.positions
        link.ops.capture_latents_(
            kv_cache, link.public.key, self.qk_rope_head_dim, *given, link.table(), link.neox
        )

    def pieces(
        self, link: CUDALatentLink, here: LatentRows, block_table: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, LatentPiece]]:
        dtype, step = link.public.key.dtype, link.runtime.step
        assert step is not None
        heads = self.num_heads, 1, self.kv_lora_rank, dtype
        found = latent_pieces(link.runtime, step, here, block_table, heads, self.row_bytes(dtype))
        return [(here.rows[piece.rows], piece) for piece in found]

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row of a piece: the query, its absorbed form, the result's two parts and
        the values derived from the result."""
        query = self.qk_nope_head_dim + self.qk_rope_head_dim + 2 * self.kv_lora_rank
        result = self.kv_lora_rank + self.v_head_dim
        parts = 2 * (self.kv_lora_rank + 1) * FLOAT_BYTES
        return self.num_heads * ((query + result) * dtype.itemsize + parts)

    def latent(
        self,
        link: CUDALatentLink,
        piece: LatentPiece,
        nope: torch.Tensor,
        pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        joined: torch.Tensor = link.ops.join_latents(
            nope,
            pe,
            link.public.key,
            kv_cache,
            block_table,
            link.table(),
            link.neox,
            piece.public,
            piece.private,
            self.scale,
        )
        return joined.to(nope.dtype)
