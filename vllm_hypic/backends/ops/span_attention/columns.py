"""Columns that query rows see, where they lie: public columns in the pool, and tokens in vLLM's cache."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class Layout(IntEnum):
    """The layout of K and V in a block of vLLM's cache; the C++ operators read known layouts faster."""

    ANYWHERE = 0
    LINES = 1
    """K of neighbouring tokens lies side by side, and so does V of neighbouring dimensions."""
    PAIRS = 2
    """K has two dimensions of each of 16 tokens side by side, then the next two; V has two tokens of each of
    16 dimensions, then the next two: the order in which AMX reads bfloat16."""


class PoolColumns(NamedTuple):
    """Public columns, in the arguments of the package's ``span_attention``."""

    key: torch.Tensor
    value: torch.Tensor
    slot_mapping: Sequence[torch.Tensor]
    kv_positions: Sequence[torch.Tensor]
    table: torch.Tensor | None
    neox: bool
    visible_kv_lens: torch.Tensor
    hidden: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


class CacheColumns(NamedTuple):
    """Tokens in vLLM's cache, in the arguments of the package's ``cache_attention``; with
    ``value_index=None`` operators do not read V."""

    cache: torch.Tensor
    key_index: torch.Tensor
    value_index: torch.Tensor | None
    block_table: torch.Tensor
    hidden: torch.Tensor | None = None
    layout: Layout = Layout.ANYWHERE
