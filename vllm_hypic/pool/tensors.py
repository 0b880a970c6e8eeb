"""Worker side of the public pool: the tensors, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .geometry import STATE_DTYPE, TRANSITION_DTYPE, LinearGeometry, PoolGeometry
from .transition_blocks import TransitionBlocks


@dataclass(frozen=True)
class PublicKV:
    """Unrotated K and V of one full-attention layer, each ``[pages * page_tokens, kv_heads, head_size]``."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LinearRecords:
    """Records of one linear layer: ``state [slots, H, K, V]`` fp32 and ``conv_tail [slots, conv_rows,
    conv_dim]`` by slot; ``transitions [blocks, K, K]`` fp16, which all layers share:
    ``block_of [slots, H]`` int32 names the block of a head, -1: the transition is zero."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    transitions: torch.Tensor
    block_of: torch.Tensor

    @staticmethod
    def allocate(
        g: LinearGeometry, slots: int, transitions: torch.Tensor, block_of: torch.Tensor, device: torch.device
    ) -> LinearRecords:
        return LinearRecords(
            torch.zeros(slots, g.heads, g.key_dim, g.value_dim, dtype=STATE_DTYPE, device=device),
            torch.zeros(slots, g.conv_rows, g.conv_dim, dtype=g.conv_dtype, device=device),
            transitions,
            block_of,
        )

    def transition(self, slot: int) -> torch.Tensor:
        """T ``[H, K, K]`` of a record, dead heads included."""
        blocks = self.block_of[slot].long()
        return self.transitions[blocks.clamp(min=0)].masked_fill((blocks < 0)[:, None, None], 0.0)


class DevicePool:
    """All public records of one worker.  Its memory is touched at once, as vLLM does with its own: else the
    first records in it would pay for its pages."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        rows, slots = geometry.pages * geometry.page_tokens, geometry.slots
        self.kv: dict[str, PublicKV] = {}
        for a in geometry.attention:
            shape = (rows, a.kv_heads, a.head_size)
            self.kv[a.layer] = PublicKV(
                torch.zeros(shape, dtype=a.dtype, device=device),
                torch.zeros(shape, dtype=a.dtype, device=device),
            )
        heads = [g.heads for g in geometry.linear]
        key_dim = geometry.linear[0].key_dim if geometry.linear else 0  # of all: see pool_geometry
        self.transition_blocks = TransitionBlocks(
            geometry.transition_blocks, key_dim, heads, slots, TRANSITION_DTYPE, device
        )
        blocks = self.transition_blocks
        self.linear = {
            g.layer: LinearRecords.allocate(g, slots, blocks.storage, block_of, device)
            for g, block_of in zip(geometry.linear, blocks.block_of, strict=True)
        }
