"""Shapes and sizes of the public pool, which scheduler and worker derive alike.

Both sides see the same ``KVCacheConfig`` of every stage, so the worker allocates exactly the pages and slots
that the scheduler hands out.
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
from .paged_states import least_pages
from .plans import Space
from .states import TRANSITION_DTYPE, StateGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec

    from ..config.engine import HypicConfig


FP8 = torch.float8_e4m3fn
"""Type of records' K and V where vLLM's cache has this type, too."""


def quantised_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of records' K and V where ``--kv-cache-dtype`` quantises vLLM's cache: the same FP8
    type, or the model's ``dtype`` for other cache types."""
    return FP8 if cache_dtype in ("fp8", "fp8_e4m3") else dtype


@dataclass(frozen=True)
class AttentionGeometry:
    """Public K and V of one attention layer: ``[pages * page_tokens, kv_heads, head_size]`` each."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    parts: ClassVar[tuple[str, ...]] = ("k", "v")
    """Names of the tensors that a record holds of a token, each ``[kv_heads, head_size]``."""

    @property
    def token_bytes(self) -> int:
        return len(self.parts) * self.kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class LatentGeometry(AttentionGeometry):
    """The public rows of one MLA layer: ``[pages * page_tokens, 1, head_size]``.  A row has first the rotated
    part of K, and then the latent, which is the rest of K and all of V."""

    parts: ClassVar[tuple[str, ...]] = ("k",)


LayerGeometry = AttentionGeometry | StateGeometry


@dataclass(frozen=True)
class PoolGeometry:
    """All values that fix the pool's memory.  Sizes are summed once, because every step reads them.

    With pipeline parallelism, the layers are those of all stages, and sizes are those of the fullest stage.
    Every stage has the same numbers of pages, slots and transition blocks, for its own layers.
    """

    attention: tuple[AttentionGeometry, ...]
    linear: tuple[StateGeometry, ...]
    page_tokens: int
    pages: int
    slots: int
    transition_blocks: int = 0
    state_pages: int = 0
    """Number of pages for the states of a slot (``paged_states.py``); 0: states have separate memory."""
    stages: tuple[tuple[str, ...], ...] = ()
    """Names of each pipeline stage's layers; empty for a single stage."""

    @property
    def pieces(self) -> list[int]:
        """Bytes that a page takes in each tensor of K or V."""
        each = self.page_tokens
        return [each * a.token_bytes // len(a.parts) for a in self.attention for _ in a.parts]

    def with_states_in_pages(self) -> PoolGeometry:
        """Return this geometry with states in pages, if every stage's pages can hold states."""
        needed = [
            least_pages(one.pieces, [part.nbytes for layer in one.linear for part in layer.parts])
            for one in self._stages
            if one.linear
        ]
        return replace(self, state_pages=max(needed, default=0) if all(needed) else 0)

    def stage(self, names: Container[str]) -> PoolGeometry:
        """Return the pool of the stage whose layers have these names."""
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
        """Bytes that a slot takes outside pages."""
        return 0 if self.state_pages else self.slot_bytes

    def bytes_of(self, space: Space) -> int:
        """Return the bytes that the pages, slots and transition blocks of ``space`` take."""
        return (
            space.pages * self.page_bytes
            + space.slots * self._own_slot_bytes
            + space.transition_blocks * self.transition_block_bytes
        )

    @property
    def space(self) -> Space:
        """The whole pool's pages, slots and transition blocks."""
        return Space(self.pages, self.slots, self.transition_blocks)

    @property
    def room(self) -> str:
        """The pool's size for the log, such as ``459 pages x 64 tokens, 28 state slots``."""
        room = [f"{self.pages} pages x {self.page_tokens} tokens"] if self.attention else []
        if self.state_pages:
            room.append(f"{self.state_pages} pages for each state")
        elif self.linear:
            room.append(f"{self.slots} state slots")
        return ", ".join(room)

    @property
    def transition_block_bytes(self) -> int:
        """Bytes of a transition ``[K, K]``; all layers with transition blocks share them and have one K."""
        return self.block_dim**2 * TRANSITION_DTYPE.itemsize

    @cached_property
    def block_dim(self) -> int:
        """K of transition blocks; 0 where no layer has transition blocks."""
        return max((layer.block_dim for layer in self.linear), default=0)

    @cached_property
    def record_transition_blocks(self) -> int:
        """Number of transition blocks of a record in which every transition is alive."""
        return max(sum(layer.blocks for layer in one.linear) for one in self._stages)

    @cached_property
    def nbytes(self) -> int:
        return self.bytes_of(self.space)


def pool_bytes(config: HypicConfig, kv_bytes: int) -> int:
    """Return the pool's byte budget beside ``kv_bytes`` of vLLM's own KV cache."""
    if config.pool_bytes is not None:
        return config.pool_bytes
    return int(kv_bytes * config.pool_fraction / (1 - config.pool_fraction))


ALL_STAGES = "hypic_stages"
"""Attribute of a ``KVCacheConfig`` under pipeline parallelism: the configs of all stages, its own included.
``patches/all_stages.py`` sets it."""


def pool_geometry(
    kv_cache_config: KVCacheConfig,
    config: HypicConfig,
    dtype: torch.dtype,
    *,
    conv_dim_first: bool,
    draft_rows: int = 0,
    states_in_pages: bool = False,
) -> PoolGeometry:
    """Divide a rank's byte budget into pages, slots and transition blocks that run out together.

    The expected segment has ``expected_segment_tokens`` and stores the share ``expected_live_heads`` of its
    transitions.  ``states_in_pages``: states lie in pages where possible (``paged_states.py``).  ``dtype``,
    ``draft_rows``: see :func:`layer_geometry`.  Every stage's ``kv_cache_config`` gives the same result.
    Raises :class:`ConfigError` if not even one expected segment fits.
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
    # Each tensor has the size of the single allocation that all tensors share.
    kv_bytes = min(max((t.size for t in stage.kv_cache_tensors), default=0) for stage in stages)
    return divided(sized, config, pool_bytes(config, kv_bytes))


def unsized(layers: Iterable[LayerGeometry], config: HypicConfig) -> PoolGeometry:
    """Return a pool of size 0.  Raises :class:`ConfigError` for layers that cannot share a pool."""
    found = list(layers)
    attention = tuple(layer for layer in found if isinstance(layer, AttentionGeometry))
    linear = tuple(layer for layer in found if isinstance(layer, StateGeometry))
    if len({layer.block_dim for layer in linear if layer.blocks}) > 1:
        raise ConfigError("hypic cannot cache linear layers of different key dimensions; serve without hypic")
    return PoolGeometry(attention, linear, config.page_tokens, pages=0, slots=0)


def divided(sized: PoolGeometry, config: HypicConfig, budget: int) -> PoolGeometry:
    """Return ``sized`` with room for ``budget`` bytes, divided as :func:`pool_geometry` says.

    Raises :class:`ConfigError` also where segments may be too short for the model's convolutions.
    """
    least = max((layer.least_tokens for layer in sized.linear), default=1)
    if config.min_segment_tokens < least:
        raise ConfigError(
            f"hypic config: min_segment_tokens={config.min_segment_tokens}: expected at least {least}, "
            "the reach of this model's convolutions: a shorter segment depends on the text before it"
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
    # Without linear layers, slots cost no memory, and pages limit segments: each takes at least one page.
    slots = segments if sized.linear and not sized.state_pages else pages // max(1, sized.state_pages)
    return replace(sized, pages=pages, slots=slots, transition_blocks=blocks)


def expected_space(geometry: PoolGeometry, config: HypicConfig) -> Space:
    """Return the space that a segment of ``expected_segment_tokens`` with ``expected_live_heads`` takes."""
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
    """Return the geometry of a layer's records, from the ``spec`` of the layer's cache.

    ``dtype``: type of K and V where the cache is quantised (:func:`quantised_dtype`); ``draft_rows``: extra
    rows of a convolution's state for drafts, which records leave out.  Raises :class:`ConfigError` for a
    layer that the pool cannot hold."""
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
    """Return the reason why the pool cannot hold a layer with this cache, or ``None``.

    The engine checks layers again when it links them.  A property that shapes the cache must be refused
    before sizes are derived from it.
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
    # An isinstance check would accept sink and sparse caches, which derive from these and hold other data.
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
        return f"KV cache of kind {type(spec).__name__}"
    if isinstance(spec, MLAAttentionSpec):
        return _latent_refusal(spec)
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return f"V of head size {spec.head_size_v} beside K of {spec.head_size}"
    return None


def _latent_refusal(spec: MLAAttentionSpec) -> str | None:
    """Return why a cache of latents is not one row of ``head_size`` numbers a token, or ``None``."""
    if spec.state_content_bytes is not None:
        return f"MLA with a packed cache ({spec.cache_dtype_str})"
    if spec.model_version is not None or spec.tokens_per_state != 1:
        return f"MLA of {spec.tokens_per_state} tokens a row ({spec.model_version})"
    if spec.non_causal_multi_token_decode:
        return "MLA with attention to later tokens"
    return None
