"""Shapes of layers: those of Qwen3-Next and Qwen3.5, and tiny ones to try everything without a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a full-attention layer; ``rotary`` of a head's ``size`` elements are rotated."""

    heads: int = 16
    kv_heads: int = 2
    size: int = 256
    rotary: int = 64
    base: float = 1e7

    @property
    def scale(self) -> float:
        return float(self.size**-0.5)


@dataclass(frozen=True)
class DeltaShape:
    """Heads of a gated delta layer: ``key_heads`` of K, ``heads`` of V, a convolution of ``taps`` rows."""

    key_heads: int = 16
    heads: int = 32
    K: int = 128
    V: int = 128
    taps: int = 4
    channel_gates: bool = False
    """A gate for each channel of K (Kimi delta attention); else for each head."""

    @property
    def gates(self) -> tuple[int, ...]:
        """What has a gate each."""
        return (self.heads, self.K) if self.channel_gates else (self.heads,)

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.key_heads * self.K + self.heads * self.V


@dataclass(frozen=True)
class StackShape:
    """A dense model: every ``period``-th layer is full attention, the others gated delta rule."""

    attention: AttentionShape = AttentionShape()
    delta: DeltaShape = DeltaShape()
    layers: int = 24
    period: int = 4
    hidden: int = 2048
    intermediate: int = 6144
    vocabulary: int = 151_936
    eps: float = 1e-6

    def is_attention(self, layer: int) -> bool:
        return layer % self.period == self.period - 1


REAL = StackShape()
TINY = StackShape(
    AttentionShape(4, 2, 64, 16),
    DeltaShape(2, 4, 64, 64),
    layers=4,
    hidden=128,
    intermediate=192,
    vocabulary=256,
)
"""A stack with head sizes that every kernel serves."""
