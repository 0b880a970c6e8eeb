"""Layers of `tests/linear` where Triton kernels run, and their checks with this folder's tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from linear.layer_inputs import Layer, Records, Segment
from linear.test_layer_operators import run_compose, run_segments

from vllm_hypic.backends.ops.gated_delta import DEAD_BELOW, Caches, Carry, Inputs, reference
from vllm_hypic.backends.ops.gated_delta.triton import operators


def moved(layer: Layer, device: torch.device) -> Layer:
    """All tensors of a layer on a device; those that are there already are shared."""
    x, w, c, r = layer.x, layer.weights, layer.caches, layer.records
    bias = None if w.bias is None else w.bias.to(device)
    return replace(
        layer,
        x=Inputs(x.mixed.to(device), x.a.to(device), x.b.to(device)),
        weights=replace(
            w,
            weight=w.weight.to(device),
            bias=bias,
            rate=w.rate.to(device),
            dt_bias=w.dt_bias.to(device),
        ),
        caches=Caches(c.slots.to(device), c.conv.to(device), c.state.to(device)),
        out=layer.out.to(device),
        records=Records(*(t.to(device) for t in (r.state, r.conv_tail, r.transitions, r.block_of))),
        carries=[
            Carry(k.transition.to(device), k.head.to(device), k.alive.to(device)) for k in layer.carries
        ],
    )


def captured(
    layer: Layer,
    segments: Sequence[Segment],
    device: torch.device,
    cuts: Sequence[int] = (),
    dead_below: float = DEAD_BELOW,
) -> tuple[Layer, Layer, Layer]:
    """`layer` after its segments were run, what the reference makes of it, and how it was before."""
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, segments)
    there = moved(layer, device)
    run_segments(operators, there, segments, cuts, dead_below)
    return moved(there, torch.device("cpu")), exact, before


def composed(layer: Layer, requests: Sequence, device: torch.device) -> tuple[Layer, Layer]:
    """`layer` after its composed requests were run, and what the reference makes of it."""
    exact = layer.exact()
    run_compose(reference, exact, requests)
    there = moved(layer, device)
    run_compose(operators, there, requests)
    return moved(there, torch.device("cpu")), exact
