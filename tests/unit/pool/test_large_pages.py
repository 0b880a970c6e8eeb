"""Tensors whose memory is in large pages where the kernel has them."""

import gc
from pathlib import Path

import pytest
import torch

from vllm_hypic.pool.tensors import LARGE, zeros

CPU = torch.device("cpu")


def flags(address: int) -> list[str]:
    """What the kernel says of the mapping with this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (word := line.split()[0]) and not word.endswith(":"):
            first, last = (int(end, 16) for end in word.split("-"))
            inside = first <= address < last
        elif inside and word == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("rows", [0, 3, LARGE // 2, LARGE + 5])
def test_like_any_other_tensor(rows: int, dtype: torch.dtype) -> None:
    made = zeros((rows, 3), dtype, CPU)
    assert made.shape == (rows, 3) and made.dtype == dtype and made.is_contiguous() and not made.any()
    view = made[rows // 2 :]
    del made
    gc.collect()
    view += 1
    assert bool((view == 1).all())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages here")
def test_the_kernel_is_asked_for_them() -> None:
    assert "hg" in flags(zeros((LARGE,), torch.uint8, CPU).data_ptr())
