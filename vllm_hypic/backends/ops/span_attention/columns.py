"""What rows see where it lies: public columns in the pool, tokens in vLLM's cache."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class Layout(IntEnum):
    """How K and V lie in a block of vLLM's cache, as far as the C++ operators read it faster for it."""

    ANYWHERE = 0
    LINES = 1
    """K of neighbouring tokens, V of neighbouring dimensions lie side by side."""
    PAIRS = 2
    """Two dimensions of K, then the next of 16 tokens; two tokens of V, then the next of 16 dimensions: as
    AMX reads bfloat16."""


class PoolColumns(NamedTuple):
    """Public columns, as the package's ``span_attention`` takes them."""

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
    """Tokens in vLLM's cache, as the package's ``cache_attention`` takes them; ``value_index=None``: V is
    not read."""

    cache: torch.Tensor
    key_index: torch.Tensor
    value_index: torch.Tensor | None
    block_table: torch.Tensor
    hidden: torch.Tensor | None = None
    layout: Layout = Layout.ANYWHERE
