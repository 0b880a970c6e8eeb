"""Shapes and sizes of the public pool, derived alike by scheduler and worker.

Both sides see the same ``KVCacheConfig``; the page and slot counts that the scheduler hands out are
those that the worker allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config.engine import HypicConfig
from ..errors import ConfigError
from .families import family_of
from .plans import Space

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

TRANSITION_DTYPE = torch.float16
"""T has spectral norm <= 1, so fp16 cannot overflow and keeps 1e-4; bf16 would lose a digit."""
STATE_DTYPE = torch.float32


@dataclass(frozen=True)
class AttentionGeometry:
    """Public K and V of one full-attention layer: ``[pages * page_tokens, kv_heads, head_size]`` each."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class LinearGeometry:
    """Records of one dense-transition linear layer.

    ``S [slots, heads, key_dim, value_dim]`` fp32 and the conv tail ``[slots, conv_rows, conv_dim]`` in the
    engine's dtype; ``T``, a block ``[key_dim, key_dim]`` fp16 for every head whose transition is not zero.
    """

    layer: str
    heads: int
    key_dim: int
    value_dim: int
    conv_rows: int
    conv_dim: int
    conv_dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        state = self.heads * self.key_dim * self.value_dim * STATE_DTYPE.itemsize
        return state + self.conv_rows * self.conv_dim * self.conv_dtype.itemsize


@dataclass(frozen=True)
class PoolGeometry:
    """Everything that fixes the pool's memory."""

    attention: tuple[AttentionGeometry, ...]
    linear: tuple[LinearGeometry, ...]
    page_tokens: int
    pages: int
    slots: int
    transition_blocks: int = 0

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * sum(a.token_bytes for a in self.attention)

    @property
    def slot_bytes(self) -> int:
        return sum(layer.slot_bytes for layer in self.linear)

    def bytes_of(self, space: Space) -> int:
        """Bytes that so many pages, slots and transition blocks take."""
        return (
            space.pages * self.page_bytes
            + space.slots * self.slot_bytes
            + space.transition_blocks * self.transition_block_bytes
        )

    @property
    def transition_block_bytes(self) -> int:
        """One transition ``[K, K]``; all linear layers share the blocks, and have one K."""
        return self.linear[0].key_dim ** 2 * TRANSITION_DTYPE.itemsize if self.linear else 0

    @property
    def record_transition_blocks(self) -> int:
        """Transition blocks of a record in which no transition has died out."""
        return sum(layer.heads for layer in self.linear)

    @property
    def nbytes(self) -> int:
        return (
            self.pages * self.page_bytes
            + self.slots * self.slot_bytes
            + self.transition_blocks * self.transition_block_bytes
        )


def pool_bytes(config: HypicConfig, kv_bytes: int) -> int:
    """Byte budget of the pool beside ``kv_bytes`` of vLLM's own KV cache."""
    if config.pool_bytes is not None:
        return config.pool_bytes
    return int(kv_bytes * config.pool_fraction / (1 - config.pool_fraction))


def pool_geometry(
    kv_cache_config: KVCacheConfig, config: HypicConfig, *, conv_dim_first: bool
) -> PoolGeometry:
    """Divide the byte budget into pages, slots and transition blocks so that they run out together at
    ``expected_segment_tokens`` per segment with a share of ``expected_live_heads`` of transitions to store.

    Raises :class:`ConfigError` when not even one such segment fits.
    """
    attention: list[AttentionGeometry] = []
    linear: list[LinearGeometry] = []
    for layer, spec in _layer_specs(kv_cache_config):
        _add_layer(layer, spec, attention, linear, conv_dim_first)
    if len({layer.key_dim for layer in linear}) > 1:
        raise ConfigError("hypic: linear layers of different key dimensions are not supported")
    # Every tensor names the size of the one allocation that they share.
    kv_bytes = max((t.size for t in kv_cache_config.kv_cache_tensors), default=0)
    budget = pool_bytes(config, kv_bytes)
    sized = PoolGeometry(tuple(attention), tuple(linear), config.page_tokens, pages=0, slots=0)
    page, slot = sized.page_bytes, sized.slot_bytes
    pages_each = -(-config.expected_segment_tokens // config.page_tokens) if attention else 0
    blocks_each = math.ceil(sized.record_transition_blocks * config.expected_live_heads)
    each = slot + pages_each * page + blocks_each * sized.transition_block_bytes
    if each == 0:
        raise ConfigError(
            "this model has neither full-attention nor supported linear-attention layers to cache"
        )
    # One segment may need a transition block for every head.
    spare = (sized.record_transition_blocks - blocks_each) * sized.transition_block_bytes
    segments = (budget - spare) // each
    if segments < 1:
        raise ConfigError(
            f"hypic config: the pool's budget of {budget} bytes holds no segment of "
            f"{config.expected_segment_tokens} tokens ({each + spare} bytes): raise pool_bytes or "
            "pool_fraction, or lower expected_segment_tokens"
        )
    blocks = segments * blocks_each + sized.record_transition_blocks - blocks_each
    rest = budget - segments * slot - blocks * sized.transition_block_bytes
    pages = rest // page if attention else 0
    # Without linear layers slots cost nothing: a segment takes at least one page.
    slots = segments if linear else pages
    return PoolGeometry(tuple(attention), tuple(linear), config.page_tokens, pages, slots, blocks)


def _layer_specs(kv_cache_config: KVCacheConfig) -> list[tuple[str, KVCacheSpec]]:
    pairs = []
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        pairs += [(name, per_layer.get(name, group.kv_cache_spec)) for name in group.layer_names]
    return sorted(pairs, key=lambda p: p[0])


def _add_layer(
    layer: str,
    spec: KVCacheSpec,
    attention: list[AttentionGeometry],
    linear: list[LinearGeometry],
    conv_dim_first: bool,
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    if reason := _refusal(spec):
        raise ConfigError(f"hypic: layer {layer}: {reason} is not supported; serve without hypic")
    if isinstance(spec, MambaSpec):
        conv, state = spec.shapes
        rows, dim = (conv[1], conv[0]) if conv_dim_first else (conv[0], conv[1])
        linear.append(LinearGeometry(layer, state[0], state[2], state[1], rows, dim, spec.dtypes[0]))
    elif isinstance(spec, FullAttentionSpec):
        attention.append(AttentionGeometry(layer, spec.num_kv_heads, spec.head_size, spec.dtype))


def _refusal(spec: KVCacheSpec) -> str | None:
    """Why a layer with this cache has no place in the pool, or ``None``.

    Layers are looked at once more when they are linked; what shapes the cache must be refused before
    sizes are worked out from it.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    if isinstance(spec, MambaSpec):
        family = family_of(spec.mamba_type.name)
        if family is None:
            return f"linear attention of kind {spec.mamba_type.name}"
        if tuple(len(shape) for shape in spec.shapes) != family.state_ranks:
            return f"linear attention with states of shapes {[tuple(shape) for shape in spec.shapes]}"
        return None
    if window := getattr(spec, "sliding_window", None):
        return f"sliding window of {window} tokens"
    if chunk := getattr(spec, "attention_chunk_size", None):
        return f"local attention in chunks of {chunk} tokens"
    # Not isinstance: latent, sink and sparse caches derive from it and hold something else.
    if type(spec) is not FullAttentionSpec:
        return f"KV cache of kind {type(spec).__name__}"
    if spec.head_size_v != spec.head_size:
        return f"V of head size {spec.head_size_v} beside K of {spec.head_size}"
    return None
