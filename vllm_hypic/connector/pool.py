"""Worker side of the public pool: the tensors, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .geometry import STATE_DTYPE, TRANSITION_DTYPE, PoolGeometry


@dataclass(frozen=True)
class PublicKV:
    """Unrotated K and V of one full-attention layer, each ``[pages * page_tokens, kv_heads, head_size]``."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LinearRecords:
    """Records of one linear layer: ``transition [slots, H, K, K]`` fp16, ``state [slots, H, K, V]``
    fp32, ``conv_tail [slots, conv_rows, conv_dim]``."""

    transition: torch.Tensor
    state: torch.Tensor
    conv_tail: torch.Tensor


class DevicePool:
    """All public records of one worker.  Memory is uninitialised until a segment is captured."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        self.geometry = geometry
        rows, slots = geometry.pages * geometry.page_tokens, geometry.slots
        self.kv: dict[str, PublicKV] = {}
        for a in geometry.attention:
            shape = (rows, a.kv_heads, a.head_size)
            self.kv[a.layer] = PublicKV(
                torch.empty(shape, dtype=a.dtype, device=device),
                torch.empty(shape, dtype=a.dtype, device=device),
            )
        self.linear: dict[str, LinearRecords] = {}
        for g in geometry.linear:
            self.linear[g.layer] = LinearRecords(
                torch.empty(slots, g.heads, g.key_dim, g.key_dim, dtype=TRANSITION_DTYPE, device=device),
                torch.empty(slots, g.heads, g.key_dim, g.value_dim, dtype=STATE_DTYPE, device=device),
                torch.empty(slots, g.conv_rows, g.conv_dim, dtype=g.conv_dtype, device=device),
            )
