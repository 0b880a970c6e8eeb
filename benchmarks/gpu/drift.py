"""How far a composed state is from that of full recompute, layer by layer (HYPIC's table 4).

Layer 0 sees nothing but embeddings, so there a composed state differs from full recompute's by rounding
alone, and both can be held against float64. Deeper layers drift because segments are computed without their
context: that is the method's approximation, not the arithmetic's. The same prompt recomputed in chunks of
another size shows what rounding alone does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from . import oracle
from .composed import ComposedPass, Composition
from .gate import relative
from .layers import Prefill, Stack
from .operators import Operators


@dataclass(frozen=True)
class LayerDrift:
    """Relative Frobenius distances of a layer's end state from that of full recompute."""

    layer: int
    composed: float
    noise: float


@dataclass(frozen=True)
class Drift:
    """All delta layers, and the first one's distances from float64."""

    layers: tuple[LayerDrift, ...]
    first_composed: float
    first_full: float


def measure_drift(
    stack: Stack,
    prompt: Composition,
    tokens: Tensor,
    composed: ComposedPass,
    operators: Operators,
    chunk: int,
    noise_chunk: int,
) -> Drift:
    """``composed``: over records that are complete; it is run once more."""
    composed.run(tokens)
    linear = [i for i in range(stack.shape.layers) if not stack.shape.is_attention(i)]
    full = _states(stack, tokens, operators, chunk)
    noise = _states(stack, tokens, operators, noise_chunk)
    layers = tuple(
        LayerDrift(i, relative(composed.state(i), full[i]), relative(noise[i], full[i])) for i in linear
    )
    truth = oracle.full(replace(stack, layers=stack.layers[:1]), tokens).states[0]
    return Drift(layers, relative(composed.state(0), truth), relative(full[0], truth))


def _states(stack: Stack, tokens: Tensor, operators: Operators, chunk: int) -> dict[int, Tensor]:
    prefill = Prefill.of(stack, tokens, operators)
    prefill.run(chunk)
    return {i: prefill.state(i).clone() for i in prefill.caches}
