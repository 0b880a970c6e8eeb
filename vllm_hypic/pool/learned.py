"""K and V of a learned context in the form of one worker's pool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ConfigError
from .geometry import LatentGeometry, PoolGeometry
from .tensors import DevicePool
from .upload import send, upload

if TYPE_CHECKING:
    from ..primitives.context import LearnedContext
    from .codec import RankPart


@dataclass(frozen=True)
class LearnedRows:
    """This rank's ``key`` and ``value [layers, tokens, kv_heads, size]``, K unrotated; ``layers``: names of
    the layers."""

    layers: tuple[str, ...]
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def of(context: LearnedContext, geometry: PoolGeometry, part: RankPart) -> LearnedRows:
        """Return this rank's rows.  Raises :class:`ConfigError` where the model has other layers or heads."""
        layers = sorted(geometry.attention, key=lambda a: [int(n) for n in re.findall(r"\d+", a.layer)])
        if geometry.linear:
            raise ConfigError(
                f"hypic config: context_file={str(context.path)!r}: learned contexts hold no states, and "
                "this model has linear-attention layers; give a context of text"
            )
        if any(isinstance(layer, LatentGeometry) for layer in layers):
            raise ConfigError(
                f"hypic config: context_file={str(context.path)!r}: learned contexts hold K and V, and "
                "this model's layers keep latents (MLA); give a context of text"
            )
        key, value = context.tensors()
        shapes = {(a.kv_heads, a.head_size) for a in layers}
        wanted = {(key.shape[2] // part.world, key.shape[3])}
        if len(layers) != len(key) or shapes != wanted:
            raise ConfigError(
                f"hypic config: context_file={str(context.path)!r} has K of {tuple(key.shape)} [layers, "
                f"tokens, heads, size]; the model has {len(layers)} layers of [heads, size] {sorted(shapes)} "
                f"on each of {part.world} ranks; train the context with this model"
            )
        heads = layers[0].kv_heads
        own = slice(part.rank * heads, (part.rank + 1) * heads)
        return LearnedRows(tuple(a.layer for a in layers), key[:, :, own], value[:, :, own])

    def of_stage(self, geometry: PoolGeometry) -> LearnedRows:
        """Return the rows of the layers of the pipeline stage with this ``geometry``."""
        kept = [self.layers.index(a.layer) for a in geometry.attention]
        return LearnedRows(tuple(self.layers[i] for i in kept), self.key[kept], self.value[kept])

    def write(self, pool: DevicePool, slots: np.ndarray) -> None:
        """Write the rows into token slots ``slots [tokens]`` of all layers."""
        [where] = upload([slots], pool.device)
        for index, name in enumerate(self.layers):
            key, value = (send(rows[index], pool.device) for rows in (self.key, self.value))
            pool.kv[name].write(where, key, value)
