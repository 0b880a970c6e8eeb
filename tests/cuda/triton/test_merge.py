"""Merging public and private attention in Triton against float64."""

import pytest
import torch
from backends.cases import Parts

from vllm_hypic.backends.ops.span_attention.triton import operators
from vllm_hypic.backends.ops.span_attention.triton.merge import merge_rows_

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def parts_of(dtype: torch.dtype, size: int) -> Parts:
    """An empty part is not read."""
    parts = Parts(dtype, size)
    parts.output[parts.NAMED[3]] = parts.other[5] = float("nan")
    return parts


@DTYPES
@pytest.mark.parametrize("size", [16, 72, 128])
def test_rows_of_requests(size: int, dtype: torch.dtype, device: torch.device) -> None:
    parts = parts_of(dtype, size)
    output = parts.output.to(device)
    operators.merge_(
        output, parts.lse.to(device), parts.other.to(device), parts.other_lse.to(device), parts.query_ranges
    )
    parts.check(output.cpu())


@DTYPES
def test_log_sum_exp_head_first(dtype: torch.dtype, device: torch.device) -> None:
    """As FlashAttention gives it, with +inf for nothing; output rows of a wider tensor."""
    parts = parts_of(dtype, 48)
    head_first = parts.lse.t().contiguous().to(device)
    head_first[:, 3] = float("inf")
    wide = torch.full((34, 6, 48), float("nan"), dtype=dtype, device=device)
    wide[:, 1:5] = parts.output.to(device)
    rows = torch.tensor(parts.NAMED, dtype=torch.int32, device=device)
    merge_rows_(wide[:, 1:5], head_first.t(), parts.other.to(device), parts.other_lse.to(device), rows)
    parts.check(wide[:, 1:5].cpu())
    assert wide[:, [0, 5]].isnan().all()


def test_a_row_that_sees_nothing_public_stays_as_it_is(device: torch.device) -> None:
    """Bit for bit."""
    output = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    before = output.clone()
    nothing = torch.full((5, 2, 64), float("nan"), device=device)
    none = torch.full((5, 2), float("-inf"), device=device)
    lse = torch.randn(5, 2, generator=torch.Generator().manual_seed(1)).to(device)
    operators.merge_(output, lse, nothing, none, torch.tensor([[0, 5]]))
    assert torch.equal(output, before)


def test_no_rows(device: torch.device) -> None:
    output = torch.zeros(2, 2, 16, device=device)
    empty = torch.zeros(0, 2, device=device)
    operators.merge_(output, empty, torch.zeros(0, 2, 16, device=device), empty, torch.tensor([[1, 1]]))
    assert not output.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_lse": torch.zeros(2, 3)}, r"output_lse \(2, 3\) torch.float32: expected \(3, 2\) float32"),
        ({"output_lse": torch.zeros(3, 2).double()}, "float64: expected"),
        ({"output": torch.zeros(9, 2, 8)}, r"expected contiguous \[..., 2, 16\]"),
        ({"other_lse": torch.zeros(4, 2)}, "expected 3 rows"),
        ({"other": torch.zeros(3, 16, 2).transpose(1, 2)}, "expected contiguous tensors"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, torch.Tensor], says: str) -> None:
    given = {
        "output": torch.zeros(9, 2, 16),
        "output_lse": torch.zeros(3, 2),
        "other": torch.zeros(3, 2, 16),
        "other_lse": torch.zeros(3, 2),
        "token_rows": torch.arange(3, dtype=torch.int32),
        **change,
    }
    with pytest.raises(ValueError, match=says):
        merge_rows_(**given)
