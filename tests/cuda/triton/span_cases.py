"""Random requests over one pool of public columns, and what span attention makes of them."""

from typing import Any

import pytest
import torch
from backends import cases

from vllm_hypic.backends.ops.span_attention import reference
from vllm_hypic.backends.ops.span_attention.triton import operators

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALES = {"key_scale": 0.02, "value_scale": 0.0371}
"""Of K and V in FP8."""


def over(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """FP8 that count times a scale."""
    return (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def skip_without_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no FP8 before compute capability 8.9")


class Case(cases.Case):
    """On a device, where the kernels run; results are brought back."""

    def __init__(self, *requests: tuple[int, int], device: torch.device, **options: Any) -> None:
        super().__init__(*requests, **options)
        for name in ("query", "key", "value", "slots", "positions", "table"):
            setattr(self, name, on(device, getattr(self, name)))

    def run(self, **scales: float) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        out, lse = operators.span_attention(*self.arguments(), **scales)
        return out.cpu(), lse.cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64."""
        return reference.span_attention(*(on(CPU, given) for given in self.arguments()))

    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.query, self.key, self.value, self.slots, self.positions, self.table, self.neox),
            *(self.visible_kv_lens, self.query_ranges, self.scale, self.hidden_kv_lens),
        )

    def check(self, larger: float = 1.0) -> None:  # type: ignore[override]
        self.compare(*self.run(), self.wanted(), larger)


def on(device: torch.device, given: Any) -> Any:
    """A tensor, or a list of them, on a device; whatever else is given stays as it is."""
    if isinstance(given, list):
        return [on(device, one) for one in given]
    return given.to(device) if isinstance(given, torch.Tensor) else given
