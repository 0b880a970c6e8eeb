"""The linear families' layer operators: which layers they run, at which sizes, and what they promise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from . import decay_inputs, decaying, layer_inputs, mamba1_inputs, mamba2_inputs, test_layer_operators
from .layers import Segment, run_compose, run_segments

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An operator: layers that it runs, at which sizes, and what it promises."""

    name: str
    folder: str
    inputs: Any
    """The module of its layers."""
    shapes: Sequence[Any]
    small: Any
    special: Mapping[str, Any] = field(default_factory=dict)
    """Shapes of single tests."""
    serves: Callable[[Any, torch.dtype], bool]
    """Shapes and dtypes of the kernels in C++; PyTorch takes all."""
    dtypes: tuple[torch.dtype, ...] = (F64, F32, BF16)
    caches: Sequence[tuple[Any, torch.dtype, torch.dtype]]
    """Shapes, dtypes of inputs and of caches with which requests are composed."""
    composed: Callable[..., Any]
    """The layer and the requests of these."""
    checks: Any = decaying
    sizes: Sequence[Sequence[int]] = ((1, 2, 3, 40, 64, 129),)
    windows: tuple[int, ...] = (8, 3, 0)
    tokens: int = 100
    """Of the segment that is run in passes, which end at `cuts`."""
    cuts: Sequence[Sequence[int]] = ((1,), (8,), (9,), (92,), (99,), (3, 8, 50, 51, 94))
    one_pass: bool = False
    """No bit in C++ depends on where passes end."""
    broken: Mapping[str, bool]
    """Inputs; whether states and later outputs feel them."""
    chunk: int
    """Before a multiple of it, broken inputs are not felt."""
    extreme: Callable[[Any, float], Any]
    extremes: Sequence[float]
    """Decays: the layer with them."""
    longest: int = 0
    """Tokens of an operation, where any may follow one another."""
    shifts: tuple[Sequence[int], Sequence[int]] | None = None
    same_bits: bool = True
    """Islands change no bit in PyTorch either."""

    def make(self, test: str, tokens: int, **options: Any) -> Any:
        return self.inputs.Layer.make(self.special.get(test, self.small), tokens, **options)

    def operators(self, name: str) -> ModuleType:
        return import_module(f"vllm_hypic.backends.ops.{self.folder}.{name}")

    def served(self, shape: Any, dtype: torch.dtype) -> list[str]:
        """The operators that serve such a layer."""
        return BOTH if self.serves(shape, dtype) else ["eager"]

    def check_segments(
        self, modules: Sequence[str], layer: Any, segments: Sequence[Segment], *cuts: int
    ) -> list[Any]:
        """Runs a copy of `layer` by each of `modules`, and compares it with the reference's; the copies."""
        exact, copies = layer.exact(), [layer.copy() for _ in modules]
        run_segments(self.operators("reference"), exact, segments)
        for module, ours in zip(modules, copies, strict=True):
            print(module)
            run_segments(self.operators(module), ours, segments, cuts)
            self.checks.check_segments(ours, exact, segments, layer)
        return copies

    def check_composed(self, modules: Sequence[str], layer: Any, requests: Sequence[Any]) -> list[Any]:
        """As :meth:`check_segments`."""
        exact, copies = layer.exact(), [layer.copy() for _ in modules]
        run_compose(self.operators("reference"), exact, requests)
        for module, ours in zip(modules, copies, strict=True):
            print(module)
            run_compose(self.operators(module), ours, requests)
            self.checks.check_composed(ours, exact, requests)
        return copies


M1, M2, DA, GD = mamba1_inputs.Shape, mamba2_inputs.Shape, decay_inputs.Shape, layer_inputs.Shape
M1_SHAPES = [M1(16, 16), M1(48, 8), M1(5, 7), M1(32, 20)]
M2_SHAPES = [
    M2(1, 1, 16, 16),
    M2(4, 2, 24, 20, bias=False),
    M2(6, 1, 5, 7, taps=2),
    M2(2, 2, 16, 48, taps=3),
    M2(6, 3, 80, 16, taps=2, bias=False),
    M2(8, 2, 64, 128),
]
DA_SHAPES = [
    DA(4, 16, 32, rotated=8),
    DA(1, 5, 7),
    DA(3, 48, 16, rotated=48, neighbours=True),
    DA(2, 128, 112, rotated=64),
    DA(3, 20, 12, channel_gates=True),
    DA(2, 32, 80, channel_gates=True),
]
SMALL2 = M2(4, 2, 16, 32)
LONGER = {
    "tokens": 200,
    "cuts": ((1,), (5,), (8,), (9,), (40,), (64,), (192,), (199,), (3, 8, 50, 51, 194), (7, 9)),
    "chunk": 64,
    "same_bits": False,
}
ALL_CACHES = (F32, BF16, F16)


def decay_kind(name: str, small: Any) -> Kind:
    shapes = [shape for shape in DA_SHAPES if shape.channel_gates == small.channel_gates]
    return Kind(
        name=name,
        folder="decay_attention",
        inputs=decay_inputs,
        shapes=shapes,
        small=small,
        special={"threads": replace(small, heads=6)},
        serves=lambda s, dtype: not (s.K % 16 or s.V % 16 or dtype == F64),
        caches=[*product(shapes, (F64, F32, BF16), ALL_CACHES)],
        composed=partial(decay_inputs.Layer.every_kind_composed, 29),
        broken={"q": False, "k": True, "v": True},
        chunk=64,
        extreme=lambda layer, g: replace(layer, x=replace(layer.x, g=torch.full_like(layer.x.g, g))),
        extremes=(0.0, -1e-6, -30.0, -1e4),
        longest=80,
        shifts=([5, 0, 0], [0, 0, 0, 5, 0, 0]),
    )


def gated_delta_kind(name: str, **gates: Any) -> Kind:
    shapes = [shape for shape in test_layer_operators.SHAPES if shape.channel_gates == bool(gates)]
    tiny = dict.fromkeys(("islands", "scan", "programs"), GD(1, 2, 16, 16, **gates))
    return Kind(
        name=name,
        folder="gated_delta",
        inputs=layer_inputs,
        shapes=shapes,
        small=GD(2, 4, 32, 48, **gates),
        special={
            **{"any passes": GD(1, 2, 16, 16, taps=3, **gates), "broken": GD(1, 2, 32, 32, **gates)},
            **{"extremes": GD(1, 2, 64, 64, **gates), "threads": GD(4, 8, 32, 64, **gates)},
            **tiny,
        },
        serves=lambda *_: True,
        dtypes=(F32, BF16),
        caches=[*product(shapes, (F32, BF16), [F32])],
        composed=lambda shape, dtype, _: layer_inputs.every_kind_composed(shape, dtype, added=400, query=63),
        checks=test_layer_operators,
        sizes=([1, 2, 31, 33], [63, 65, 500]),
        windows=(8, 3, 0, 0),
        broken=dict.fromkeys(("mixed", "a", "b"), True),
        extreme=layer_inputs.Layer.with_gates,
        extremes=(-100.0, -3000.0, -0.5, -1e-4, 0.0),
        **LONGER,
    )


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="mamba1",
            folder="mamba1",
            inputs=mamba1_inputs,
            shapes=M1_SHAPES,
            small=M1(32, 16),
            special={"parts": M1(8, 12), "scan": M1(8, 8), "long": M1(16, 4), "threads": M1(128, 16)},
            serves=lambda s, dtype: not (s.channels % 16 or s.N % 4 or dtype == F64),
            caches=[*product(M1_SHAPES, (F64, F32, BF16), ALL_CACHES)],
            composed=partial(mamba1_inputs.Layer.every_kind_composed, 29),
            one_pass=True,
            # The others are read by their own row alone.
            broken={"x": True, "dt": True, "gate": False, "B": True, "C": False},
            chunk=1,
            extreme=mamba1_inputs.Layer.with_steps,
            extremes=(-30.0, -9.0, 0.0, 20.0, 1000.0),
            longest=40,
        ),
        Kind(
            name="mamba2",
            folder="mamba2",
            inputs=mamba2_inputs,
            shapes=M2_SHAPES,
            small=SMALL2,
            special={
                **{"any passes": M2(2, 1, 16, 16, taps=3), "any composition": M2(4, 2, 16, 16, taps=3)},
                **{"parts": M2(4, 2, 8, 12), "scan": M2(2, 1, 8, 8), "long": M2(2, 1, 16, 16, taps=2)},
                "threads": M2(8, 2, 32, 64),
            },
            serves=lambda s, dtype: not (s.P % 16 or s.N % 16 or dtype == F64),
            caches=[*product(M2_SHAPES, (F64, F32, BF16), [F32]), (SMALL2, F32, BF16), (SMALL2, F32, F16)],
            composed=partial(mamba2_inputs.Layer.every_kind_composed, 129),  # longer than two chunks
            sizes=([1, 2, 3, 63], [64, 65, 129, 300]),
            broken={"mixed": True, "dt": True},
            extreme=mamba2_inputs.Layer.with_decay,
            extremes=(-3000.0, -100.0, -0.5, -1e-4, -1e-7),
            longest=70,
            **LONGER,
        ),
        decay_kind("constant-decay", DA(3, 32, 16, rotated=16)),
        # Interiors of 100 tokens and more may forget all.
        decay_kind("channel-decay", DA(2, 16, 32, channel_gates=True)),
        gated_delta_kind("gates-of-heads"),
        gated_delta_kind("gates-of-channels", channel_gates=True),
    )
}
DECAYING = {name: kind for name, kind in KINDS.items() if kind.checks is decaying}
CONVOLVED = ("mamba2", "gates-of-heads", "gates-of-channels")
IDS = {"native": "c++", "eager": "eager", "reference": "reference"}
BOTH = ["native", "eager"]
MODULES = pytest.mark.parametrize("module", BOTH, ids=IDS.get)
BOTH_MODULES = pytest.mark.parametrize("modules", [BOTH], ids=["c++ eager"])
"""The reference runs once for both."""
LAWFUL = pytest.mark.parametrize("module", ["reference", "eager"])
"""Those that compute in float64 where inputs are."""


def each(kinds: Mapping[str, Kind] = KINDS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds.values(), ids=kinds)


def served(of: Callable[[Kind], Sequence[tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """What a kind gives, its first two being a shape and a dtype, with the modules that serve it."""
    cases = []
    for kind in KINDS.values():
        for given in of(kind):
            modules = kind.served(*given[:2])
            named = (kind.name, " ".join(IDS[module] for module in modules), *given)
            cases.append(pytest.param(kind, modules, given, id="-".join(map(str, named))))
    return pytest.mark.parametrize(("kind", "modules", "given"), cases)
