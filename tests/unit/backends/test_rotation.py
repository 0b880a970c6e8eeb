"""Rotation of K by a table of cos and sin, and its inverse, against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.backends.ops.span_attention import eager
from vllm_hypic.backends.ops.span_attention.eager import rotate, unrotate
from vllm_hypic.backends.ops.span_attention.reference import rotate_reference, unrotate_reference

from .cases import DTYPES, cos_sin_table


class Rotated:
    """Unrotated rows, a table with ``scale`` rounded to ``table_dtype``, and positions anywhere in it."""

    def __init__(
        self,
        rows: int,
        *,
        rotary: int,
        neox: bool = True,
        size: int = 64,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.neox = neox
        self.raw = torch.randn(rows, 2, size, generator=rng).to(dtype)
        self.positions = torch.randint(0, 5000, (rows,), generator=rng)
        self.table = (scale * cos_sin_table(rotary)).to(table_dtype or dtype) if rotary else None
        rotation = None if self.table is None else self.table[self.positions]
        self.rotated = rotate(self.raw, rotation, neox)

    def lengths(self) -> torch.Tensor:
        """Of the pair that every element of ``raw`` belongs to; roundings are relative to it."""
        squares = self.raw.double() ** 2
        if self.table is not None:
            rotary = self.table.shape[1]
            pairs = squares[..., :rotary]
            if self.neox:
                total = (pairs + pairs.roll(rotary // 2, -1)).sqrt()
            else:
                total = pairs.unflatten(-1, (-1, 2)).sum(-1).sqrt().repeat_interleave(2, -1)
            return torch.cat([total, squares[..., rotary:].sqrt()], -1)
        return squares.sqrt()

    def check(self) -> None:
        before = self.rotated.clone()
        ours = unrotate(self.rotated, self.table, self.positions, self.neox)
        assert ours.dtype == self.raw.dtype and ours.shape == self.raw.shape
        assert torch.equal(self.rotated, before), "the cache's own K was changed"
        limits, lengths = torch.finfo(self.raw.dtype), self.lengths()
        unit = limits.eps / 2  # the largest relative error of one rounding
        least = limits.smallest_normal * unit  # rounding among subnormal numbers
        # float32 arithmetic, then one rounding.
        wanted = unrotate_reference(self.rotated, self.table, self.positions, self.neox)
        error = (ours.double() - wanted).abs()
        assert (error <= 1.01 * unit * wanted.abs() + 8 * 2**-24 * lengths + least).all(), error.max()
        # Once when it was rotated, once now: an element errs by both of its pair's roundings.
        error = (ours.double() - self.raw.double()).abs()
        assert (error <= (3 * unit + 12 * 2**-24) * lengths + 4 * least).all(), (error / lengths).max()


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_rotation_keeps_its_input(neox: bool) -> None:
    """K in the pool is read by every request: rotating it in place would destroy it."""
    case = Rotated(20, rotary=16)
    raw, rotation = case.raw, case.table[case.positions]
    before = raw.clone()
    ours = rotate(raw, rotation, neox)
    assert torch.equal(raw, before)
    torch.testing.assert_close(ours.double(), rotate_reference(raw, rotation, neox), rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[..., 16:], before[..., 16:]), "elements outside the rotary dimension moved"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1.14])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [0, 16, 64])
def test_unrotate(
    rotary: int, neox: bool, scale: float, table_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Rows of more than one block; the table's own rounding and mscale must not be seen."""
    rows = eager._UNROTATE_BLOCK + 7
    Rotated(rows, rotary=rotary, neox=neox, dtype=dtype, table_dtype=table_dtype, scale=scale).check()


OPTIONS = st.fixed_dictionaries(
    {
        "neox": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
        "table_dtype": st.sampled_from(DTYPES),
        "scale": st.floats(0.5, 2),
        "seed": st.integers(0, 2**20),
    }
)


@given(st.integers(0, 40), st.sampled_from([(64, 64), (64, 32), (80, 20), (6, 2), (256, 64)]), OPTIONS)
def test_unrotate_anything(rows: int, sizes: tuple[int, int], options: dict[str, Any]) -> None:
    Rotated(rows, size=sizes[0], rotary=sizes[1], **options).check()


def test_unrotate_leaves_out_nothing() -> None:
    """The bounds of ``Rotated.check`` see each part of the inverse."""
    case = Rotated(50, rotary=32, table_dtype=torch.bfloat16)
    right = case.table
    cos, sin = right.chunk(2, -1)
    wrong = {
        "another position": right.roll(1, 0),
        "the other direction": torch.cat([cos, -sin], -1),
        "the table before it was rounded": Rotated(1, rotary=32).table,
        "a plain transpose": right * (cos.float() ** 2 + sin.float() ** 2).repeat(1, 2),
    }
    case.check()
    for name, table in wrong.items():
        ours = unrotate(case.rotated, table, case.positions, True)
        error = (ours - case.raw).abs().double() / case.lengths()
        assert error.max() > 100 * 2**-24, name
