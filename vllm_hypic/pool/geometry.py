"""Shapes and sizes of the public pool, derived alike by scheduler and worker.

Both sides see the same ``KVCacheConfig`` of every stage; the page and slot counts that the scheduler hands
out are those that the worker allocates.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import ConfigError
from .families import family_of
from .plans import Space
from .state_layout import least_pages
from .states import TRANSITION_DTYPE, StateGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec

    from ..config.engine import HypicConfig


FP8 = torch.float8_e4m3fn
"""Type of K and V of records beside a cache of the same."""


def quantised_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Type of K and V of records where vLLM's cache is quantised as ``--kv-cache-dtype`` says: as there, or
    the model's ``dtype``."""
    return FP8 if cache_dtype in ("fp8", "fp8_e4m3") else dtype


@dataclass(frozen=True)
class AttentionGeometry:
    """Public K and V of one attention layer: ``[pages * page_tokens, kv_heads, head_size]`` each."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    parts: ClassVar[tuple[str, ...]] = ("k", "v")
    """What a record holds of a token, each ``[kv_heads, head_size]``."""

    @property
    def token_bytes(self) -> int:
        return len(self.parts) * self.kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class LatentGeometry(AttentionGeometry):
    """The public rows of one MLA layer: ``[pages * page_tokens, 1, head_size]``, first the part of K that is
    rotated, then the latent, which is the rest of K and all of V."""

    parts: ClassVar[tuple[str, ...]] = ("k",)


LayerGeometry = AttentionGeometry | StateGeometry


@dataclass(frozen=True)
class PoolGeometry:
    """Everything that fixes the pool's memory.  Sizes are summed once: every step asks for them.

    With pipeline parallelism the layers are those of all stages, and sizes those of the fullest: every stage
    has as many pages, slots and transition blocks, of its own layers.
    """

    attention: tuple[AttentionGeometry, ...]
    linear: tuple[StateGeometry, ...]
    page_tokens: int
    pages: int
    slots: int
    transition_blocks: int = 0
    state_pages: int = 0
    """Pages that the states of a slot lie in (``paged_states.py``); 0: they have a memory of their own."""
    stages: tuple[tuple[str, ...], ...] = ()
    """Names of each pipeline stage's layers; empty: there is one stage."""

    @property
    def pieces(self) -> list[int]:
        """Bytes of a page, by tensor of K or V."""
        each = self.page_tokens
        return [each * a.token_bytes // len(a.parts) for a in self.attention for _ in a.parts]

    def with_states_in_pages(self) -> PoolGeometry:
        """The same whose states lie in pages, if a page of every stage can hold such."""
        needed = [
            least_pages(one.pieces, [part.nbytes for layer in one.linear for part in layer.parts])
            for one in self._stages
            if one.linear
        ]
        return replace(self, state_pages=max(needed, default=0) if all(needed) else 0)

    def stage(self, names: Container[str]) -> PoolGeometry:
        """The pool of the stage that has the layers of these names."""
        return replace(
            self,
            attention=tuple(a for a in self.attention if a.layer in names),
            linear=tuple(layer for layer in self.linear if layer.layer in names),
            stages=(),
        )

    @cached_property
    def _stages(self) -> tuple[PoolGeometry, ...]:
        return tuple(map(self.stage, self.stages)) or (self,)

    @cached_property
    def page_bytes(self) -> int:
        return self.page_tokens * max(sum(a.token_bytes for a in one.attention) for one in self._stages)

    @cached_property
    def slot_bytes(self) -> int:
        return max(sum(layer.slot_bytes for layer in one.linear) for one in self._stages)

    @property
    def _own_slot_bytes(self) -> int:
        """What a slot takes besides pages."""
        return 0 if self.state_pages else self.slot_bytes

    def bytes_of(self, space: Space) -> int:
        """Bytes that so many pages, slots and transition blocks take."""
        return (
            space.pages * self.page_bytes
            + space.slots * self._own_slot_bytes
            + space.transition_blocks * self.transition_block_bytes
        )

    @property
    def space(self) -> Space:
        """All of it."""
        return Space(self.pages, self.slots, self.transition_blocks)

    @property
    def room(self) -> str:
        """What the log says of the pool: ``459 pages x 64 tokens, 28 state slots``, of what there is."""
        room = [f"{self.pages} pages x {self.page_tokens} tokens"] if self.attention else []
        if self.state_pages:
            room.append(f"{self.state_pages} pages for each state")
        elif self.linear:
            room.append(f"{self.slots} state slots")
        return ", ".join(room)

    @property
    def transition_block_bytes(self) -> int:
        """One transition ``[K, K]``; all layers that have any share the blocks, and have one K."""
        return self.block_dim**2 * TRANSITION_DTYPE.itemsize

    @cached_property
    def block_dim(self) -> int:
        """K of transition blocks; 0 where no layer has any."""
        return max((layer.block_dim for layer in self.linear), default=0)

    @cached_property
    def record_transition_blocks(self) -> int:
        """Transition blocks of a record in which no transition has died out."""
        return max(sum(layer.blocks for layer in one.linear) for one in self._stages)

    @cached_property
    def nbytes(self) -> int:
        return self.bytes_of(self.space)


def pool_bytes(config: HypicConfig, kv_bytes: int) -> int:
    """Byte budget of the pool beside ``kv_bytes`` of vLLM's own KV cache."""
    if config.pool_bytes is not None:
        return config.pool_bytes
    return int(kv_bytes * config.pool_fraction / (1 - config.pool_fraction))


ALL_STAGES = "hypic_stages"
"""Attribute of a ``KVCacheConfig`` beside which there are others, of other pipeline stages: all of them, its
own included.  ``patches/all_stages.py`` sets it."""


def pool_geometry(
    kv_cache_config: KVCacheConfig,
    config: HypicConfig,
    dtype: torch.dtype,
    *,
    conv_dim_first: bool,
    draft_rows: int = 0,
    states_in_pages: bool = False,
) -> PoolGeometry:
    """Divide a rank's byte budget into pages, slots and transition blocks so that they run out together at
    ``expected_segment_tokens`` per segment with a share of ``expected_live_heads`` of transitions to store.
    ``states_in_pages``: where they can, slots are pages' (``paged_states.py``).

    ``dtype``, ``draft_rows``: see :func:`layer_geometry`.  The same from every stage's ``kv_cache_config``.
    Raises :class:`ConfigError` when not even one such segment fits.
    """
    stages: Sequence[KVCacheConfig] = getattr(kv_cache_config, ALL_STAGES, (kv_cache_config,))
    specs = [_layer_specs(stage) for stage in stages]
    layers = [
        layer_geometry(name, spec, dtype, config, conv_dim_first=conv_dim_first, draft_rows=draft_rows)
        for name, spec in sorted((one for stage in specs for one in stage), key=lambda one: one[0])
    ]
    sized = unsized(layers, config)
    if len(stages) > 1:
        sized = replace(sized, stages=tuple(tuple(name for name, _ in stage) for stage in specs))
    if states_in_pages:
        sized = sized.with_states_in_pages()
    # Every tensor names the size of the one allocation that they share.
    kv_bytes = min(max((t.size for t in stage.kv_cache_tensors), default=0) for stage in stages)
    return divided(sized, config, pool_bytes(config, kv_bytes))


def unsized(layers: Iterable[LayerGeometry], config: HypicConfig) -> PoolGeometry:
    """A pool without room.  Raises :class:`ConfigError` for layers that cannot share one."""
    found = list(layers)
    attention = tuple(layer for layer in found if isinstance(layer, AttentionGeometry))
    linear = tuple(layer for layer in found if isinstance(layer, StateGeometry))
    if len({layer.block_dim for layer in linear if layer.blocks}) > 1:
        raise ConfigError("hypic cannot cache linear layers of different key dimensions; serve without hypic")
    return PoolGeometry(attention, linear, config.page_tokens, pages=0, slots=0)


def divided(sized: PoolGeometry, config: HypicConfig, budget: int) -> PoolGeometry:
    """``sized`` with room for ``budget`` bytes, divided as :func:`pool_geometry` says.

    Raises :class:`ConfigError` also where segments may be so short that their records would not do.
    """
    least = max((layer.least_tokens for layer in sized.linear), default=1)
    if config.min_segment_tokens < least:
        raise ConfigError(
            f"hypic config: min_segment_tokens={config.min_segment_tokens}: expected at least {least}, "
            "as this model's convolutions reach so far: a shorter segment depends on the text before it"
        )
    space = expected_space(sized, config)
    if not (each := sized.bytes_of(space)):
        raise ConfigError(
            "hypic: this model has no full-attention or supported linear-attention layer; serve without hypic"
        )
    # One segment may need a transition block for every head.
    spare_blocks = sized.record_transition_blocks - space.transition_blocks
    spare = spare_blocks * sized.transition_block_bytes
    segments = (budget - spare) // each
    if segments < 1:
        raise ConfigError(
            f"hypic config: the pool's budget of {budget} bytes holds no segment of "
            f"{config.expected_segment_tokens} tokens ({each + spare} bytes): raise pool_bytes or "
            "pool_fraction, or lower expected_segment_tokens"
        )
    blocks = segments * space.transition_blocks + spare_blocks
    own = Space(0, segments, blocks)
    pages = (budget - sized.bytes_of(own)) // sized.page_bytes if sized.attention else 0
    # Without linear layers slots cost nothing: a segment takes at least one page.
    slots = segments if sized.linear and not sized.state_pages else pages // max(1, sized.state_pages)
    return replace(sized, pages=pages, slots=slots, transition_blocks=blocks)


def expected_space(geometry: PoolGeometry, config: HypicConfig) -> Space:
    """What a segment of ``expected_segment_tokens`` with ``expected_live_heads`` takes in such a pool."""
    pages = -(-config.expected_segment_tokens // geometry.page_tokens) if geometry.attention else 0
    blocks = math.ceil(geometry.record_transition_blocks * config.expected_live_heads)
    return Space(pages + geometry.state_pages, 1 if geometry.linear else 0, blocks)


def _layer_specs(kv_cache_config: KVCacheConfig) -> list[tuple[str, KVCacheSpec]]:
    pairs = []
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        pairs += [(name, per_layer.get(name, group.kv_cache_spec)) for name in group.layer_names]
    return sorted(pairs, key=lambda p: p[0])


def layer_geometry(
    layer: str,
    spec: KVCacheSpec,
    dtype: torch.dtype,
    config: HypicConfig,
    *,
    conv_dim_first: bool,
    draft_rows: int = 0,
) -> LayerGeometry:
    """What records hold of a layer with this cache, in ``dtype`` where the cache is quantised
    (:func:`quantised_dtype`).  ``draft_rows``: rows that a convolution's state has beside its own, for
    drafts; records have none.  Raises :class:`ConfigError` where it has no place in the pool."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

    if reason := cache_refusal(spec):
        raise ConfigError(f"hypic: layer {layer}: {reason} is not supported; serve without hypic")
    if isinstance(spec, MambaSpec):
        family = family_of(spec.mamba_type.name)
        assert family is not None
        shapes = [list(shape) for shape in spec.shapes]
        shapes[0][1 if conv_dim_first else 0] -= draft_rows
        made = family.geometry.of(layer, shapes, spec.dtypes, conv_dim_first)
        return replace(made, state_dtype=getattr(torch, config.state_dtype))
    assert isinstance(spec, AttentionSpec)
    kind = LatentGeometry if isinstance(spec, MLAAttentionSpec) else AttentionGeometry
    quantised = spec.dtype.itemsize == 1
    return kind(layer, spec.num_kv_heads, spec.head_size, dtype if quantised else spec.dtype)


def cache_refusal(spec: KVCacheSpec) -> str | None:
    """Why a layer with this cache has no place in the pool, or ``None``.

    Layers are looked at once more when they are linked; what shapes the cache must be refused before
    sizes are worked out from it.
    """
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, MambaSpec):
        family = family_of(spec.mamba_type.name)
        if family is None:
            return f"linear attention of kind {spec.mamba_type.name}"
        if tuple(len(shape) for shape in spec.shapes) != family.geometry.state_ranks:
            return f"linear attention with states of shapes {[tuple(shape) for shape in spec.shapes]}"
        return None
    if chunk := getattr(spec, "attention_chunk_size", None):
        return f"local attention in chunks of {chunk} tokens"
    # Not isinstance: sink and sparse caches derive from it and hold something else.
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
        return f"KV cache of kind {type(spec).__name__}"
    if isinstance(spec, MLAAttentionSpec):
        return _latent_refusal(spec)
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return f"V of head size {spec.head_size_v} beside K of {spec.head_size}"
    return None


def _latent_refusal(spec: MLAAttentionSpec) -> str | None:
    """Why a cache of latents is not one row of ``head_size`` numbers a token, or ``None``."""
    if spec.state_content_bytes is not None:
        return f"MLA with a packed cache ({spec.cache_dtype_str})"
    if spec.model_version is not None or spec.tokens_per_state != 1:
        return f"MLA of {spec.tokens_per_state} tokens a row ({spec.model_version})"
    if spec.non_causal_multi_token_decode:
        return "MLA whose rows see later ones"
    return None
