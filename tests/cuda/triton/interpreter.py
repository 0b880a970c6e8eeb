"""Corrections of the interpreter of Triton 3.9, which is silently wrong in bfloat16.

It carries bfloat16 as its 16 bits in ``np.uint16`` and hands that to numpy, which takes them for integers:

- arithmetic, comparisons and functions of bfloat16 compute with the bits;
- so do ``tl.dot`` and the reductions and scans;
- conversions to bfloat16 cut off instead of rounding to nearest even; of float16 and integers they yield
  the integer;
- apart from bfloat16, ``tl.dot`` of float32 is exact even where a GPU would round to TF32, so a kernel that
  forgets ``input_precision`` passes.

FP8 (e4m3) loses its NaN, subnormal numbers on the way from float32, and everything on the way to bfloat16.

And it runs the programs of a grid one after the other, where a GPU promises no order: here each launch has a
random one, by the seed in ``HYPIC_GRID_SEED``, 0 if it is not set.

Corrected, bfloat16 is computed in float32 and rounded once, as a GPU does.  Each correction is needed until
``test_interpreter.py`` fails because the interpreter is right without it; then it is to be removed.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

_ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def widened(bits: np.ndarray) -> np.ndarray:
    """float32 of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    up = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, up).astype(np.uint16)


def _tf32(handle: TensorHandle) -> TensorHandle:
    """The nearest numbers of TF32, which has 13 binary digits less, ties to even."""
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    nearest = (bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    values = np.where(np.isfinite(handle.data), nearest.view(np.float32), handle.data)
    return TensorHandle(values, tl.float32)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _wide(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widened(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(rounded(handle.data), tl.bfloat16)


def _of_fp8(src: TensorHandle, dst_type: tl.dtype) -> TensorHandle | None:
    """A conversion from or to FP8, saturating as a GPU's; ``None``: it is neither."""
    source, target = src.dtype.scalar, dst_type.scalar
    if (source == tl.float8e4nv) == (target == tl.float8e4nv):
        return None
    if source == tl.float8e4nv:
        wide = torch.from_numpy(np.ascontiguousarray(src.data)).view(torch.float8_e4m3fn).float().numpy()
        values = TensorHandle(wide.reshape(src.data.shape), tl.float32)
        return values if target == tl.float32 else stock.interpreter_builder.cast_impl(values, target)
    values = widened(src.data) if _is_bf16(src) else src.data.astype(np.float32)
    largest = torch.finfo(torch.float8_e4m3fn).max
    narrow = torch.from_numpy(np.array(values)).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return TensorHandle(narrow.view(torch.uint8).numpy(), tl.float8e4nv)


class CorrectedBuilder(InterpreterBuilder):
    """What the interpreter does for one instruction, and which program of a grid it runs next."""

    _draw = random.Random(int(os.environ.get("HYPIC_GRID_SEED", "0")))
    _order: Sequence[int] = ()

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        super().set_grid_dim(nx, ny, nz)
        programs = nx * ny * nz
        self._order = self._draw.sample(range(programs), programs)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        program = self._order[(x * ny + y) * nz + z]
        super().set_grid_idx(program // (ny * nz), program // nz % ny, program % nz)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
        if not _is_bf16(lhs) or op in _ON_BITS:
            return super().binary_op(lhs, rhs, op)
        result = super().binary_op(_wide(lhs), _wide(rhs), op)
        return result if result.data.dtype == np.bool_ else _narrow(result)

    def unary_op(self, arg: TensorHandle, op: Callable) -> TensorHandle:
        return _narrow(super().unary_op(_wide(arg), op)) if _is_bf16(arg) else super().unary_op(arg, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not _is_bf16(z):
            return super().create_fma(x, y, z)
        return _narrow(super().create_fma(_wide(x), _wide(y), _wide(z)))

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return _narrow(super().create_rsqrt(_wide(arg))) if _is_bf16(arg) else super().create_rsqrt(arg)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if (fp8 := _of_fp8(src, dst_type)) is not None:
            return fp8
        if dst_type.scalar == tl.bfloat16 and not _is_bf16(src):
            return TensorHandle(rounded(src.data.astype(np.float32)), tl.bfloat16)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(
        self, src: TensorHandle, dst_type: tl.dtype, rounding: ir.ROUNDING_MODE | None
    ) -> TensorHandle:
        to_nearest = rounding in (None, ir.ROUNDING_MODE.RTNE)
        if to_nearest and {tl.bfloat16, tl.float8e4nv} & {src.dtype.scalar, dst_type.scalar}:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding)

    def create_dot(
        self,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        input_precision: ir.INPUT_PRECISION,
        max_num_imprecise_acc: int,
    ) -> TensorHandle:
        a, b = _wide(a), _wide(b)
        if input_precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32:
            a, b = _tf32(a), _tf32(b)
        return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)


def _wide_tensor(x: tl.tensor) -> tl.tensor:
    if x.dtype != tl.bfloat16:
        return x
    return tl.tensor(_wide(x.handle), tl.block_type(tl.float32, list(x.handle.data.shape)))


def _like(result: tl.tensor, x: tl.tensor) -> tl.tensor:
    """A reduction's result in the type of what was reduced; indices stay what they are."""
    if x.dtype != tl.bfloat16 or result.dtype != tl.float32:
        return result
    narrow = _narrow(result.handle)
    return tl.tensor(narrow, tl.block_type(tl.bfloat16, list(result.shape)) if result.shape else tl.bfloat16)


class _Widened:
    """Reduces bfloat16 in float32 and rounds the result once."""

    def apply_impl(self, input: tuple[tl.tensor, ...]) -> tuple[tl.tensor, ...] | tl.tensor:
        results = super().apply_impl(tuple(map(_wide_tensor, input)))  # type: ignore[misc]
        if isinstance(results, tl.tensor):
            return _like(results, input[0])
        return tuple(_like(result, x) for result, x in zip(results, input, strict=True))


class CorrectedReduce(_Widened, ReduceOps):
    pass


class CorrectedScan(_Widened, ScanOps):
    pass


def install() -> None:
    """Correct the interpreter of this process."""
    stock.interpreter_builder.__class__ = CorrectedBuilder
    stock.ReduceOps, stock.ScanOps = CorrectedReduce, CorrectedScan


@contextmanager
def uncorrected() -> Iterator[None]:
    """The interpreter as Triton ships it, for the tests of the corrections."""
    stock.interpreter_builder.__class__ = InterpreterBuilder
    stock.ReduceOps, stock.ScanOps = ReduceOps, ScanOps
    try:
        yield
    finally:
        install()
