"""The interpreter's corrections: right with them, wrong without them.

A test that fails because the stock interpreter is right tells that its correction can go.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    from interpreter import uncorrected
else:
    uncorrected = nullcontext

NEEDED = INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""All corrections are: Triton 3.6's interpreter is right without some."""

SIZE = 32


def values(seed: int, dtype: torch.dtype = torch.bfloat16, rows: int = SIZE) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def elementwise_kernel(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    if OP == "add":
        c = a + b
    elif OP == "multiply":
        c = a * b
    elif OP == "negate":
        c = -a
    elif OP == "largest":
        c = tl.maximum(a, b)
    elif OP == "smaller":
        c = tl.where(a < b, a, b)
    elif OP == "fma":
        c = tl.fma(a, b, a)
    elif OP == "narrow":
        c = a.to(out.dtype.element_ty)
    elif OP == "narrow to nearest":
        c = a.to(out.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(out + at, c)


@triton.jit
def reduce_kernel(x, out, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = tl.load(x + at[:, None] * N + at[None, :])
    if OP == "sum":
        tl.store(out + at, tl.sum(tile, 1))
    elif OP == "argmax":
        tl.store(out + at, tl.argmax(tile, 1))
    elif OP == "cumsum":
        tl.store(out + at[:, None] * N + at[None, :], tl.cumsum(tile, 1))


@triton.jit
def running_sum_kernel(x, out, N: tl.constexpr):
    """Wrong: every program counts on the one before it."""
    at = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    before = tl.load(out + at)
    tl.store(out + at + 1, before + tl.load(x + at))


@triton.jit
def dot_kernel(x, y, out, N: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, N)
    tile = at[:, None] * N + at[None, :]
    tl.store(out + tile, tl.dot(tl.load(x + tile), tl.load(y + tile), input_precision=PRECISION))


def check(holds: Callable[[], bool], needed: bool = INTERPRETED) -> None:
    """With the corrections, and where they are needed not without."""
    assert holds()
    if needed:
        with uncorrected():
            assert not holds()


def near(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> bool:
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=rtol, atol=atol)


def elementwise(op: str, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype, device=x.device)
    elementwise_kernel[(1,)](x, y, out, op, x.numel())
    return out.view(x.shape)


ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "negate": lambda a, b: -a,
    "largest": torch.maximum,
    "smaller": torch.minimum,
    "fma": lambda a, b: (a.double() * b.double() + a.double()).to(a.dtype),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # what bits yield as numbers
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_bf16_is_no_integer(op: str, device: torch.device) -> None:
    a, b = values(0).to(device), values(1).to(device)
    wanted = ELEMENTWISE[op](a, b)
    check(lambda: torch.equal(elementwise(op, a, b, torch.bfloat16), wanted), NEEDED)


@pytest.mark.parametrize(
    ("op", "source"),
    [
        ("narrow", torch.float32),
        ("narrow to nearest", torch.float32),
        ("narrow", torch.float16),
        ("narrow", torch.int32),
    ],
)
def test_conversions_round_to_nearest_even(op: str, source: torch.dtype, device: torch.device) -> None:
    if source == torch.int32:
        x = torch.arange(1, 4096, 4, dtype=source, device=device)
    else:
        x = values(0, source).flatten().to(device)
        x[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8]).to(source)  # ties
        if source == torch.float32:
            x[3:6] = torch.tensor([float("inf"), 2 - 2**-20, 1e-39])  # carries into the exponent; subnormal
    wanted = x.to(torch.bfloat16)
    check(lambda: torch.equal(elementwise(op, x, x, torch.bfloat16), wanted))


def test_nan_stays_nan(device: torch.device) -> None:
    x = torch.full((16,), float("nan"), device=device)
    assert elementwise("narrow", x, x, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_is_what_it_is_in_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    """There and back, NaN and subnormal numbers among them; what is too large becomes the largest."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no FP8 before compute capability 8.9")
    kind = torch.float8_e4m3fn
    every = torch.arange(256, dtype=torch.uint8).view(kind).to(device)
    wide = every.to(dtype)
    x = (values(3) * torch.logspace(-4, 4, SIZE)).flatten().to(dtype).to(device)
    narrow = x.float().clamp(-448, 448).to(kind)

    def right() -> bool:
        found = elementwise("narrow", every, every, dtype)
        back = elementwise("narrow", x, x, kind).view(torch.uint8)
        return torch.equal(found.nan_to_num(-1), wide.nan_to_num(-1)) and torch.equal(
            back, narrow.view(torch.uint8)
        )

    check(right)


@pytest.mark.parametrize("op", ["sum", "argmax", "cumsum"])
def test_reductions_of_bf16(op: str, device: torch.device) -> None:
    x = values(2).to(device)

    def run() -> torch.Tensor:
        shape = (SIZE, SIZE) if op == "cumsum" else (SIZE,)
        out = torch.zeros(shape, dtype=torch.int32 if op == "argmax" else x.dtype, device=device)
        reduce_kernel[(1,)](x, out, op, SIZE)
        return out

    wanted = getattr(x.float(), op)(1)
    # A GPU may round sums in between.
    tolerances = (0.0, 0.0) if op == "argmax" else (2**-7, 2**-6)
    check(lambda: near(run(), wanted, *tolerances), NEEDED)


def dot(x: torch.Tensor, y: torch.Tensor, precision: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dot_kernel[(1,)](x, y, out, SIZE, precision)
    return out


def test_dot_of_bf16(device: torch.device) -> None:
    a, b = values(0).to(device), values(1).to(device)
    wanted = a.float() @ b.float()
    check(lambda: near(dot(a, b, "ieee"), wanted, 1e-5, 1e-5))


def test_dot_loses_digits_where_a_gpu_does(device: torch.device) -> None:
    a, b = values(0, torch.float32).to(device), values(1, torch.float32).to(device)
    wanted = (a.double() @ b.double()).float()
    for precision in ("ieee", "tf32x3"):
        assert near(dot(a, b, precision), wanted, 1e-5, 1e-5)
    assert float((dot(a, b, "tf32") - wanted).abs().max()) > 1e-4
    if INTERPRETED:
        with uncorrected():
            assert near(dot(a, b, "tf32"), wanted, 1e-5, 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU may well run them in order")
def test_programs_run_in_no_order_and_each_once() -> None:
    x = torch.ones(12)
    orders = set()
    for _ in range(3):
        out = torch.zeros(13)
        running_sum_kernel[(4, 3)](x, out, 12)
        # Each added its one to something: none was left out, and not all waited for another.
        assert (out[1:] >= 1).all() and out[12] < 12
        orders.add(tuple(out.tolist()))
    assert len(orders) == 3
    with uncorrected():
        out = torch.zeros(13)
        running_sum_kernel[(12,)](x, out, 12)
        assert out.tolist() == list(range(13))
