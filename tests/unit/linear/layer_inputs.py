"""Random layers for the gated delta layer operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import GatedDeltaCarry, GatedDeltaInputs, GatedDeltaWeights
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches

from . import layers
from .layers import PAD, SLOTS, Composed, Segment, World, compose_program, segment_program, unwritten

__all__ = ["PAD", "SLOTS", "Composed", "Layer", "Records", "Segment", "Shape", "compose_program",
           "every_kind_composed", "segment_program"]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    key_heads: int
    heads: int
    K: int
    V: int
    taps: int = 4
    bias: bool = True
    largest_beta: float = 1.0
    channel_gates: bool = False
    gate_bound: float = 0.0

    @property
    def gates(self) -> tuple[int, ...]:
        """What has a gate each."""
        return (self.heads, self.K) if self.channel_gates else (self.heads,)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.K + self.heads * self.V


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    conv_tail: Tensor
    transitions: Tensor
    block_of: Tensor


class Layer(World):
    family = "gdn"

    @staticmethod
    def make(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
        """Gates as Mamba and GDN initialise them: A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""
        s, gen = shape, torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=gen)
        bias = layers.step_biases(gen, *s.gates)
        weights = GatedDeltaWeights.prepare(
            0.5 * normal(s.channels, s.taps),
            0.1 * normal(s.channels) if s.bias else None,
            torch.log(1 + 15 * torch.rand(s.heads, generator=gen)),
            bias,
            s.key_heads,
            1e-5,
            s.largest_beta,
            s.gate_bound,
        )
        rows = tokens + 2 * PAD
        mixed, a, b = normal(rows, s.channels), 0.5 * normal(rows, *s.gates), normal(rows, s.heads)
        x = GatedDeltaInputs(*(layers.amid_poison(t).to(dtype) for t in (mixed, a, b)))
        conv = layers.cache(2, s.taps - 1, s.channels, dtype=dtype)
        caches = LayerCaches(layers.slots(), conv, layers.cache(3, s.heads, s.K, s.V, dtype=torch.float32))
        records = Records(
            unwritten(SLOTS, s.heads, s.K, s.V),
            unwritten(SLOTS, s.taps - 1, s.channels, dtype=dtype),
            unwritten(SLOTS * s.heads, s.K, s.K, dtype=torch.half),
            torch.arange(SLOTS * s.heads, dtype=torch.int32).flip(0).reshape(SLOTS, s.heads).clone(),
        )
        carries = [layers.emptied(GatedDeltaCarry.beside(records.state)) for _ in range(SLOTS)]
        return Layer(shape, x, weights, caches, unwritten(rows, s.heads, s.V, dtype=dtype), records, carries)

    def with_gates(self, g: float) -> Layer:
        """All tokens of all heads decay by e^g; not of shapes with a `gate_bound`."""
        # softplus(x) = x to float32's precision for such x
        bias = torch.full_like(self.weights.dt_bias, 40.0)
        weights = replace(self.weights, rate=torch.full((self.shape.heads,), g / 40), dt_bias=bias)
        return replace(self, weights=weights, x=replace(self.x, a=torch.zeros_like(self.x.a)))

    def transition(self, slot: int) -> Tensor:
        blocks = self.records.block_of[slot].long()
        dead = (blocks < 0)[:, None, None]
        return torch.where(dead, 0.0, self.records.transitions[blocks.clamp(min=0)].double())

    def random_record(self, slot: int, seed: int, dead: Sequence[int] = ()) -> None:
        """A record like one of real tokens: T of norm below 1; `dead` heads without."""
        gen = torch.Generator().manual_seed(seed)
        s, r = self.shape, self.records
        r.state[slot] = torch.randn(s.heads, s.K, s.V, generator=gen)
        r.conv_tail[slot] = torch.randn(s.taps - 1, s.channels, generator=gen).to(r.conv_tail.dtype)
        for h in range(s.heads):
            if h in dead:
                r.block_of[slot, h] = -1
            else:
                block = torch.randn(s.K, s.K, generator=gen) / (2 * math.sqrt(s.K))
                r.transitions[r.block_of[slot, h]] = block.half().to(r.transitions.dtype)


def every_kind_composed(
    shape: Shape, dtype: torch.dtype, *, added: int, query: int
) -> tuple[Layer, list[Composed]]:
    """A layer and these requests."""
    tokens, requests = layers.every_kind(added, query)
    layer = Layer.make(shape, tokens, dtype)
    for slot in range(4):
        layer.random_record(slot, slot, dead=[0] if slot == 1 else range(shape.heads) if slot == 2 else ())
    layer.resume(2)
    return layer, requests
