"""Plans: what they hold, what they refuse."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from conftest import INTERPRETED
from linear.layer_inputs import SLOTS, Layer, Segment, Shape, compose_program, segment_program
from linear.layers import relative
from linear.test_layer_operators import run_compose, run_segments

from vllm_hypic.backends.ops.gated_delta.triton import operators
from vllm_hypic.backends.ops.linear_layer.triton.plan import Source, plan_compose, plan_segments
from vllm_hypic.backends.ops.linear_layer.triton.products import add_times, add_times_few
from vllm_hypic.backends.ops.program import Mode, SegmentRow, pack

CPU = torch.device("cpu")


def test_chunks_end_at_the_interior_and_know_what_stands_before_their_run() -> None:
    segments = [Segment(0, 0, 100, 8, 92, 1), Segment(2, 100, 5, 0, 5, 3, True)]
    plan = plan_segments(segment_program(segments, start=3), CPU)
    assert plan.chunk == 32
    first = plan.chunks[0, 0].item()
    relative_rows = [(at - first, n, run - first, *rest) for at, n, run, *rest in plan.chunks.tolist()]
    pieces = (0, 5), (5, 32), (37, 32), (69, 20), (89, 8)
    assert relative_rows[:5] == [(*piece, 0, Source.CACHE, 0) for piece in pieces]
    assert relative_rows[5][1:] == (2, 100, Source.CACHE, 2)
    assert plan.scans.tolist() == [[0, 1, 0, 1, 4, 5, 0], [2, 1, 5, 5, 6, 6, 1]]
    assert plan.taken == () and plan.left == ()
    assert plan_segments(segment_program(segments, 0, 50), CPU).left == ((0, 0),)


def test_records_begin_a_run() -> None:
    operations = [(0, 20, 4, Mode.TRANSITION), (20, 7, -1, Mode.NONE)]
    plan = plan_compose(*compose_program([(1, False, operations)]), CPU)
    assert plan.chunk == 32
    assert [tuple(row[3:]) for row in plan.chunks.tolist()] == [(Source.ZEROS, 0), (Source.RECORD, 4)]
    assert plan.steps.tolist() == [[0, 1, 4, Mode.TRANSITION], [1, 2, -1, Mode.NONE]]
    assert all(t.data_ptr() % 16 == 0 for t in (plan.chunks, plan.scans, plan.steps, plan.contexts))


@pytest.mark.parametrize(("rows", "chunk"), [(16, 16), (17, 32), (32, 32), (8, 16), (500, 32)])
def test_short_pieces_get_short_chunks(rows: int, chunk: int) -> None:
    operations = [(i * rows, rows, 0, Mode.ADD) for i in range(4)]
    assert plan_compose(*compose_program([(0, False, operations)]), CPU).chunk == chunk


def test_programs_that_contradict_themselves_are_refused() -> None:
    good = segment_program([Segment(0, 0, 20, 4, 20, 1)])
    row = SegmentRow(*good[0].tolist())
    for bad, message in ((row._replace(end=row.stop + 1), "<= end"), (row._replace(ends=0), "carry")):
        with pytest.raises(ValueError, match=message):
            plan_segments(pack([bad], SegmentRow), CPU)
    apart = compose_program([(0, False, [(0, 2, -1, Mode.NONE), (5, 2, -1, Mode.NONE)])])
    with pytest.raises(ValueError, match="end at"):
        plan_compose(*apart, CPU)
    with pytest.raises(ValueError, match="in CPU memory"):
        plan_segments(good.to("meta"), CPU)


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
    good = Segment(0, 0, 20, 0, 20, 1)
    for bad, message in {
        replace(good, tokens=40, hi=20): "token rows",
        replace(good, batch_row=SLOTS): "batch rows",
        replace(good, slot=SLOTS): "record slots",
    }.items():
        with pytest.raises(IndexError, match=message):
            run_segments(operators, layer, [bad])
    with pytest.raises(IndexError, match="record slots"):
        run_compose(operators, layer, [(0, False, [(0, 1, SLOTS, Mode.TRANSITION)])])
    with pytest.raises(IndexError, match="carries"):
        run_segments(operators, replace(layer, carries=[]), [good], [10])
    assert layer.out.isnan().all() and layer.caches.state.isnan().all()


def test_a_step_without_requests_does_nothing() -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 4)
    run_segments(operators, layer, [Segment(0, 0, 4, 0, 4, 1)], cuts=[4])
    run_compose(operators, layer, [])


@triton.jit
def product_kernel(few, x, out, FROM_LEFT: tl.constexpr, ROUGH: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b, total = tl.load(few + at), tl.load(x + at), tl.load(out + at)
    if ROUGH:
        total += tl.dot(a.to(tl.float32), b, input_precision="tf32")
    elif FROM_LEFT:
        total = add_times(a, b, total)
    else:
        total = add_times_few(b, a, total)
    tl.store(out + at, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_as_exact_as_float32(dtype: torch.dtype, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(2)
    few = torch.randn(32, 32, generator=gen).to(dtype)
    x, to = torch.randn(32, 32, generator=gen), torch.randn(32, 32, generator=gen)
    for from_left in (True, False):
        out = to.to(device, copy=True)
        product_kernel[1,](few.to(device), x.to(device), out, FROM_LEFT=from_left, ROUGH=False, N=32)
        wanted = to.double() + (few.double() @ x.double() if from_left else x.double() @ few.double())
        assert relative(out.cpu(), wanted) < 1e-6
    rough = to.to(device, copy=True)
    product_kernel[1,](few.to(device), x.to(device), rough, FROM_LEFT=True, ROUGH=True, N=32)
    assert relative(rough.cpu(), to.double() + few.double() @ x.double()) > 2e-5, (
        "one TF32 product is not enough"
    )


@pytest.mark.skipif(INTERPRETED, reason="CPU tensors have no pinned copies here")
def test_plans_are_copied_without_waiting(device: torch.device) -> None:
    plan = plan_compose(*compose_program([(0, False, [(0, 4, -1, Mode.NONE)])]), device)
    assert plan.chunks.device.type == device.type
