"""Records of families whose transition is a decay, scalar or diagonal: S <- e^{log_decay} S + S_zero.

Reference: `Summary.after` in `backends/linear/algebra.py` with `ScalarTransition` or `DiagonalTransition`.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernel_spec import KernelSpec, Limits

BLOCK = 1024


@triton.jit
def decay_kernel(log_decay_ptr, zero_ptr, before_ptr, after_ptr, inner, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    factor = tl.exp(tl.load(log_decay_ptr + at // inner, mask=real, other=0.0))
    before = tl.load(before_ptr + at, mask=real, other=0.0).to(tl.float32)
    after = factor * before + tl.load(zero_ptr + at, mask=real, other=0.0).to(tl.float32)
    tl.store(after_ptr + at, after.to(after_ptr.dtype.element_ty), mask=real)


def after_decay(log_decay: Tensor, zero: Tensor, before: Tensor, out: Tensor | None = None) -> Tensor:
    """The state behind a record: e^log_decay `before` + `zero`.

    log_decay   float32, <= 0, -inf forgets all; its shape is the leading part of the states': [.., H] for
                scalar, [.., H, K] or that of the whole state for diagonal families
    zero        [.., H, K, V] the record's state from a zero start, before: the running one; any float type
    out         where to write the result, perhaps `before` itself; a new float32 tensor if not given

    All contiguous. Raises `ValueError` where shapes do not fit.
    """
    shape = log_decay.shape
    if before.shape[: len(shape)] != shape or zero.shape != before.shape:
        raise ValueError(
            f"log_decay {tuple(shape)}, record {tuple(zero.shape)}, state {tuple(before.shape)}: the first "
            "must be a leading part of the others, which must be equal"
        )
    out = torch.empty_like(before, dtype=torch.float32) if out is None else out
    if out.shape != before.shape:
        raise ValueError(f"out {tuple(out.shape)} must have the state's shape {tuple(before.shape)}")
    for name, tensor in (("log_decay", log_decay), ("record", zero), ("state", before), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"the {name} of shape {tuple(tensor.shape)} must be contiguous")
    size = before.numel()
    if size:
        inner = size // log_decay.numel()
        decay_kernel[(triton.cdiv(size, BLOCK),)](
            log_decay, zero, before, out, inner, size, BLOCK=BLOCK, num_warps=4
        )
    return out


SPECS = (
    KernelSpec(
        "gated_delta decay",
        decay_kernel,
        {
            **dict.fromkeys(("log_decay_ptr", "zero_ptr", "before_ptr", "after_ptr"), "*fp32"),
            **dict.fromkeys(("inner", "size"), "i32"),
        },
        {"BLOCK": BLOCK},
        warps=4,
        stages=3,
        aligned=("log_decay_ptr", "zero_ptr", "before_ptr", "after_ptr", "inner", "size"),
        limit=Limits(registers=64),
    ),
)
