"""Layers of `tests/linear` where Triton kernels run, and what the float64 reference makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from linear import decaying, layer_inputs, mamba2_inputs, test_layer_operators, test_mamba2
from linear.layer_inputs import Segment

from vllm_hypic.backends.ops.gated_delta import reference as delta_reference
from vllm_hypic.backends.ops.gated_delta.triton import operators as delta_operators
from vllm_hypic.backends.ops.mamba2 import reference as mamba2_reference
from vllm_hypic.backends.ops.mamba2.triton import operators as mamba2_operators

CPU = torch.device("cpu")


def rounded_once() -> AbstractContextManager[Any]:
    """Mamba2's reference rounds what is convolved as vLLM does on CUDA, once."""
    return patch.object(mamba2_reference, "activated", lambda total, dtype: F.silu(total).to(dtype))


@dataclass(frozen=True)
class Kind:
    """A family of layers: its random layers, operators and checks."""

    name: str
    inputs: Any
    checks: Any
    running: Any
    operators: ModuleType
    reference: ModuleType
    carried: str
    """What an interior carries from pass to pass."""
    as_on_cuda: Callable[[], AbstractContextManager[Any]] = nullcontext

    def make(self, shape: Any, tokens: int, *dtypes: torch.dtype, **more: Any) -> Any:
        return self.inputs.Layer.make(shape, tokens, *dtypes, **more)

    def segments(self, layer: Any, segments: Sequence[Segment], *cuts: Any, exactly: bool = False) -> None:
        """Runs segment requests by our operators, or by the reference."""
        with self.as_on_cuda():
            self.running.run_segments(self._module(exactly), layer, segments, *cuts)

    def compose(self, layer: Any, requests: Sequence[Any], exactly: bool = False) -> None:
        with self.as_on_cuda():
            self.running.run_compose(self._module(exactly), layer, requests)

    def _module(self, exactly: bool) -> ModuleType:
        return self.reference if exactly else self.operators

    def captured(
        self, layer: Any, segments: Sequence[Segment], device: torch.device, *cuts: Any
    ) -> tuple[Any, Any, Any]:
        """`layer` after its segments were run, what the reference makes of it, and how it was before."""
        exact, before, there = layer.exact(), layer.copy(), moved(layer, device)
        self.segments(exact, segments, exactly=True)
        self.segments(there, segments, *cuts)
        return moved(there, CPU), exact, before

    def check_segments(
        self, layer: Any, segments: Sequence[Segment], device: torch.device, *cuts: Any
    ) -> Any:
        """The layer after its segments were run; all that they write is as the reference has it."""
        ours, exact, before = self.captured(layer, segments, device, *cuts)
        self.checks.check_segments(ours, exact, segments, before)
        return ours

    def check_composed(self, layer: Any, requests: Sequence[Any], device: torch.device) -> Any:
        exact, there = layer.exact(), moved(layer, device)
        self.compose(exact, requests, exactly=True)
        self.compose(there, requests)
        ours = moved(there, CPU)
        self.checks.check_composed(ours, exact, requests)
        return ours

    def __str__(self) -> str:
        return self.name


DELTA = Kind(
    "gated delta", layer_inputs, test_layer_operators, test_layer_operators,
    delta_operators, delta_reference, carried="transition",
)  # fmt: skip
MAMBA2 = Kind(
    "mamba2", mamba2_inputs, test_mamba2, decaying,
    mamba2_operators, mamba2_reference, carried="state", as_on_cuda=rounded_once,
)  # fmt: skip
SMALL = mamba2_inputs.Shape(2, 1, 16, 16)

for kind in (DELTA, MAMBA2):  # their checks are shared with kernels that serve no fp16
    kind.checks.TOLERANCE[torch.float16], kind.checks.OUT_TOLERANCE[torch.float16] = 1e-4, 1e-3


def on(given: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on a device; those that are there already are shared."""
    found = {f.name: getattr(given, f.name) for f in fields(given)}
    return replace(given, **{k: v.to(device) for k, v in found.items() if isinstance(v, torch.Tensor)})


def moved(layer: Any, device: torch.device) -> Any:
    """All tensors of a layer on a device."""
    parts = {name: on(getattr(layer, name), device) for name in ("x", "weights", "caches", "records")}
    carries = [on(carry, device) for carry in layer.carries]
    return replace(layer, **parts, out=layer.out.to(device), carries=carries)
