"""Layers of `tests/unit/linear` where Triton kernels run, and what the float64 reference makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
from linear import kinds, layer_inputs, mamba2_inputs, test_layer_operators
from linear.layers import Segment, run_segments

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
SMALL = mamba2_inputs.Shape(2, 1, 16, 16)

of_delta = test_layer_operators.TOLERANCE, test_layer_operators.OUT_TOLERANCE
for tolerance, out in (of_delta, (mamba2_inputs.Layer.tolerance, mamba2_inputs.Layer.out_tolerance)):
    tolerance[torch.float16], out[torch.float16] = 1e-4, 1e-3  # shared with kernels that serve no fp16


class There:
    """A family's operators, which run on the device, for layers that are here."""

    def __init__(self, operators: ModuleType) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._run, getattr(self._operators, name))

    def _run(self, operator: Callable[..., None], *given: Any) -> None:
        """A layer is given first, then its program, which stays on the host, and what passes carry."""
        there = [on(part) if i < 5 or isinstance(part, list) else part for i, part in enumerate(given)]
        operator(*there)
        for mine, theirs in zip(given[2:], there[2:], strict=True):
            brought_back(mine, theirs)


def on(given: Any) -> Any:
    """A tensor, or a dataclass or list of them, on the device; its tensors are not copied needlessly."""
    if isinstance(given, list):
        return [on(one) for one in given]
    if is_dataclass(given):
        return replace(given, **{f.name: on(getattr(given, f.name)) for f in fields(given)})
    return given.to(DEVICE) if isinstance(given, torch.Tensor) else given


def brought_back(mine: Any, theirs: Any) -> None:
    if isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):
            brought_back(one, other)
    elif is_dataclass(mine):
        for f in fields(mine):
            brought_back(getattr(mine, f.name), getattr(theirs, f.name))
    elif isinstance(mine, torch.Tensor) and mine is not theirs:
        mine.copy_(theirs)


@dataclass(frozen=True, kw_only=True)
class Kind(kinds.Kind):
    """An operator of `tests/unit/linear` whose module `triton` runs on the device."""

    def operators(self, name: str) -> Any:
        return There(super().operators("triton.operators")) if name == "triton" else super().operators(name)

    def of(self, shape: Any, **changed: Any) -> Kind:
        """With layers of this shape."""
        return replace(self, small=shape, **changed)

    def captured(self, layer: Any, segments: Sequence[Segment], *given: Any) -> Any:
        """What the reference makes of a layer whose segments are run."""
        exact = layer.exact()
        run_segments(self.operators("reference"), exact, segments)
        run_segments(self.operators("triton"), layer, segments, *given)
        return exact

    def __str__(self) -> str:
        return self.name


def kind(name: str, of: str, **changed: Any) -> Kind:
    given = {f.name: getattr(kinds.KINDS[of], f.name) for f in fields(kinds.Kind)}
    return Kind(**given | {"name": name, "special": {}, "windows": (8, 3, 0, 0), "tokens": 100} | changed)


DELTA = kind(
    "gated delta",
    "gates-of-heads",
    composed=lambda shape, dtype, _: layer_inputs.every_kind_composed(shape, dtype, added=64, query=15),
)
MAMBA2 = kind("mamba2", "mamba2", small=SMALL)
