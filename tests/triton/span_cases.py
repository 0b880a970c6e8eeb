"""Random requests over one pool of public columns, and what span attention makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import plan, reference
from vllm_hypic.backends.ops.span_attention.triton import operators

POSITIONS = 1000

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an output relative to the largest value, about four roundings of the dtype: K is
rounded once after its rotation, probabilities once before they weigh V."""
LSE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Absolute: scores have a standard deviation of one and an error of the rounding of K."""
DTYPES = list(TOLERANCE)
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALES = {"key_scale": 0.02, "value_scale": 0.0371}
"""Of K and V in FP8."""


def over(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """FP8 that count times a scale."""
    return (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def short_parts(patch: pytest.MonkeyPatch) -> None:
    """Parts of 64 columns for few rows, of 128 for many."""
    for module in (plan, operators):
        patch.setattr(module, "part_columns", lambda kv_heads, block: 64 if block == 16 else 128)


def skip_without_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no FP8 before compute capability 8.9")


@dataclass(frozen=True)
class Heads:
    """``rotary=None``: all dimensions are rotated; 0: none."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    rotary: int | None = None
    neox: bool = True


def cos_sin_table(rotary: int, dtype: torch.dtype) -> torch.Tensor:
    """``[POSITIONS, rotary]``: cos, then sin."""
    angles = torch.arange(POSITIONS)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


class Case:
    """Requests of so many rows and columns each.  Slots without a column and query rows of nobody are NaN.

    Of each request the first row sees nothing, the last everything.
    """

    def __init__(
        self,
        *requests: tuple[int, int],
        shape: Heads = Heads(),
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype | None = None,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=rng).to(dtype)

        counts = [columns for _, columns in requests]
        slots = torch.randperm(2 * sum(counts) + 5, generator=rng)
        taken = slots[: sum(counts)]
        pool = (len(slots), shape.kv_heads, shape.size)
        key, value = torch.full(pool, float("nan"), dtype=dtype), torch.full(pool, float("nan"), dtype=dtype)
        key[taken] = normal(len(taken), *pool[1:])
        value[taken] = normal(len(taken), *pool[1:])
        rotary = shape.size if shape.rotary is None else shape.rotary
        table = cos_sin_table(rotary, table_dtype or dtype) if rotary else None
        query_ranges, visible_kv_lens, at = [], [], 0
        for rows, columns in requests:
            at += 3  # rows of somebody else
            query_ranges.append((at, at + rows))
            at += rows
            seen = torch.randint(0, columns + 1, (rows,), generator=rng)
            seen[0], seen[-1] = 0, columns
            visible_kv_lens.append(seen)
        query = torch.full((at + 2, shape.heads, shape.size), float("nan"), dtype=dtype)
        for first, last in query_ranges:
            query[first:last] = normal(last - first, shape.heads, shape.size)

        self.neox, self.scale, self.device, self.dtype = shape.neox, shape.size**-0.5, device, dtype
        self.query, self.key, self.value = query.to(device), key.to(device), value.to(device)
        self.table = None if table is None else table.to(device)
        self.slots = [s.to(device) for s in taken.split(counts)]
        self.positions = [torch.randint(0, POSITIONS, (c,), generator=rng).to(device) for c in counts]
        self.query_ranges, self.visible_kv_lens = torch.tensor(query_ranges), torch.cat(visible_kv_lens)
        self.hidden_kv_lens: torch.Tensor | None = None

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the kernels, on the CPU."""
        out, lse = operators.span_attention(
            self.query,
            self.key,
            self.value,
            self.slots,
            self.positions,
            self.table,
            self.neox,
            self.visible_kv_lens,
            self.query_ranges,
            self.scale,
            self.hidden_kv_lens,
        )
        return out.cpu(), lse.cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64."""
        return reference.span_attention(
            self.query.cpu(),
            self.key.cpu(),
            self.value.cpu(),
            [s.cpu() for s in self.slots],
            [p.cpu() for p in self.positions],
            None if self.table is None else self.table.cpu(),
            self.neox,
            self.visible_kv_lens,
            self.query_ranges,
            self.scale,
            self.hidden_kv_lens,
        )

    def check(self, larger: float = 1.0) -> None:
        """``larger``: how much larger scores, and with them errors, are than of standard deviation one."""
        self.compare(*self.run(), larger)

    def compare(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        larger: float = 1.0,
        wanted: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        wanted_out, wanted_lse = self.wanted() if wanted is None else wanted
        assert out.dtype == lse.dtype == torch.float32
        assert out.shape == wanted_out.shape and lse.shape == wanted_lse.shape
        largest = float(self.value[torch.cat(self.slots)].abs().nan_to_num(0.0).max())
        error = float((out.double() - wanted_out).abs().max()) / largest
        assert error <= larger * TOLERANCE[self.dtype], error
        hidden = 0 if self.hidden_kv_lens is None else self.hidden_kv_lens
        blind = self.visible_kv_lens <= hidden
        assert (lse[blind] == float("-inf")).all() and (out[blind] == 0).all()
        if not blind.all():
            error = float((lse - wanted_lse)[~blind].abs().max())
            assert error <= larger * LSE_TOLERANCE[self.dtype], error
