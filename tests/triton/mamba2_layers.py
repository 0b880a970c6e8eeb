"""Mamba2 layers of `tests/linear` where Triton kernels run; what the float64 reference makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from linear.decaying import run_compose, run_segments
from linear.layer_inputs import Composed, Segment
from linear.mamba2_inputs import Layer

from vllm_hypic.backends.ops.mamba2 import reference
from vllm_hypic.backends.ops.mamba2.triton import operators


def on(given: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on a device; those that are there already are shared."""
    found = {f.name: getattr(given, f.name) for f in fields(given)}
    return replace(given, **{k: v.to(device) for k, v in found.items() if isinstance(v, torch.Tensor)})


def moved(layer: Layer, device: torch.device) -> Layer:
    """All tensors of a layer on a device."""
    parts = {name: on(getattr(layer, name), device) for name in ("x", "weights", "caches", "records")}
    carries = [on(carry, device) for carry in layer.carries]
    return replace(layer, **parts, out=layer.out.to(device), carries=carries)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """The reference rounds what is convolved as vLLM does on CUDA, once."""
    with patch.object(reference, "activated", lambda total, dtype: F.silu(total).to(dtype)):
        yield


def captured(
    layer: Layer, segments: Sequence[Segment], device: torch.device, cuts: Sequence[int] = ()
) -> tuple[Layer, Layer, Layer]:
    """`layer` after its segments were run, what the reference makes of it, and how it was before."""
    exact, before = layer.exact(), layer.copy()
    with as_on_cuda():
        run_segments(reference, exact, segments)
    there = moved(layer, device)
    run_segments(operators, there, segments, cuts)
    return moved(there, torch.device("cpu")), exact, before


def composed(layer: Layer, requests: Sequence[Composed], device: torch.device) -> tuple[Layer, Layer]:
    """`layer` after its composed requests were run, and what the reference makes of it."""
    exact = layer.exact()
    with as_on_cuda():
        run_compose(reference, exact, requests)
    there = moved(layer, device)
    run_compose(operators, there, requests)
    return moved(there, torch.device("cpu")), exact
