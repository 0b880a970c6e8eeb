"""``copies``: what copies of records between pool and host memory cost the passes beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from vllm_hypic.harness.report import size
from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy import mover_of
from vllm_hypic.pool.copy.base import RecordMover
from vllm_hypic.pool.copy.staged import StagedMover
from vllm_hypic.pool.copy.staging import BLOCK_BYTES, HOST_BLOCKS, HostBlocks
from vllm_hypic.pool.copy.stream import side_stream_of
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import RecordPlace
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.store.record import aligned_buffer, begin_record, record_nbytes

from ..lib import report
from ..lib.report import REPORT_FILE, check_outputs, seconds
from ..lib.stats import Spread
from .composed import PAGE, ComposedPass, Composition, Pool, SegmentPass
from .device import Facts, device_option
from .gate import GateFailed, reporting_failures
from .layers import Stack
from .operators import operators_for
from .shapes import REAL, TINY, StackShape

ALONE, OUT, INTO = "alone", "beside a record that leaves", "beside a record that comes"
BUSY_CYCLES = 100_000_000
"""For so long the device is busy before a pass and the copies beside it begin, together: the host launches
both meanwhile."""


@dataclass(frozen=True)
class CopyTimes:
    """Seconds of one pass, by what goes on beside it.

    ``passes``: on the device; ``ordering``: of the thread that launches passes, for launching the copies.
    """

    case: str
    passes: dict[str, Spread]
    ordering: dict[str, Spread]


class MovingRecord:
    """A record of a model of this shape, which leaves the pool and comes to another place."""

    def __init__(self, shape: StackShape, tokens: int, device: torch.device) -> None:
        a, d = shape.attention, shape.delta
        names = [(f"layers.{i}", shape.is_attention(i)) for i in range(shape.layers)]
        attention = [AttentionGeometry(n, a.kv_heads, a.size, torch.bfloat16) for n, full in names if full]
        linear = [
            LinearGeometry(n, d.heads, d.K, d.V, d.taps - 1, d.channels, torch.bfloat16)
            for n, full in names
            if not full
        ]
        pages, blocks = -(-tokens // PAGE), d.heads * len(linear)
        geometry = PoolGeometry(tuple(attention), tuple(linear), PAGE, 2 * pages, 2, 2 * blocks)
        self.pool = DevicePool(geometry, device)
        self.mover = _mover(self.pool)
        codec = RecordCodec(self.pool, Namespace.from_config({}), RankPart(), self.mover)
        order = np.random.default_rng(0).permutation(2 * pages).reshape(2, -1, 1) * PAGE
        slots = (order + np.arange(PAGE)).reshape(2, -1)[:, :tokens]
        self.here = RecordPlace(0, SegmentKey("ab" * 32), 0, slots[0], False, 1, 1.0)
        self.there = replace(self.here, serial=1, slot=1, slot_mapping=slots[1])
        for kv in self.pool.kv.values():
            kv.key.normal_()
            kv.value.normal_()
        for records in self.pool.linear.values():
            for part in records.parts:
                assert isinstance(part, torch.Tensor)
                part.normal_()
        self.pool.transition_blocks.offer(0)
        self.pool.transition_blocks.settle(0)
        self.header = codec.header(self.here)
        self.buffer = aligned_buffer(record_nbytes(self.header))

    def leave(self) -> None:
        self.mover.write(self.here, self.header, self.buffer, self._told)

    def arrive(self) -> None:
        """What :meth:`prepare` has put into blocks."""
        self.mover.settle(self.there, lambda blocks: None)

    def prepare(self) -> None:
        """As the store's thread: the record's bytes are checked, and wait to be copied to the device."""
        views = begin_record(self.buffer, self.header)
        self.pool.transition_blocks.offer(self.there.slot)
        self.mover.intake(self.there)({name: np.frombuffer(v, np.uint8) for name, v in views.items()})

    @property
    def is_there(self) -> bool:
        """Whether K, V and states are the same in both places."""
        return all(torch.equal(*pair) for pair in zip(self._at(self.here), self._at(self.there), strict=True))

    def _at(self, place: RecordPlace) -> list[torch.Tensor]:
        rows = torch.from_numpy(place.slot_mapping).to(self.pool.device)
        kv = [t[rows] for one in self.pool.kv.values() for t in (one.key, one.value)]
        return kv + [t[place.slot] for one in self.pool.linear.values() for t in one.parts]

    @staticmethod
    def _told(fault: str) -> None:
        if fault:
            raise GateFailed(fault)


def _mover(pool: DevicePool) -> RecordMover:
    """That of a device; where there is none, with copies that happen at once."""
    if pool.device.type == "cuda":
        return mover_of(pool)
    return StagedMover(pool, side_stream_of(pool.device), HostBlocks(HOST_BLOCKS, BLOCK_BYTES, pinned=False))


def measure(record: MovingRecord, case: str, run: Callable[[], object], repeats: int) -> CopyTimes:
    """Times of ``run``, which only launches.  Raises :class:`GateFailed` where the record is not whole."""
    orders: dict[str, Callable[[], None]] = {ALONE: lambda: None, OUT: record.leave, INTO: record.arrive}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in orders}
    for repeat in range(repeats + 1):
        for name, order in orders.items():
            if name == INTO:
                record.prepare()
            times = _beside(record, order, run)
            if repeat:  # the first compiles
                found[name].append(times)
        if not record.is_there:
            raise GateFailed("the arrived record differs from the sent record")
    spreads = {name: [Spread.of(one) for one in zip(*times, strict=True)] for name, times in found.items()}
    return CopyTimes(case, *({name: s[i] for name, s in spreads.items()} for i in range(2)))


def _beside(
    record: MovingRecord, order: Callable[[], None], run: Callable[[], object]
) -> tuple[float, float]:
    """Seconds of the pass, and of ordering the copies."""
    cuda = record.pool.device.type == "cuda"
    began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
    ordered = time.perf_counter()
    order()
    ordering = time.perf_counter() - ordered
    if began is not None and done is not None:
        began.record()
        run()
        done.record()
        done.synchronize()
        passed = began.elapsed_time(done) / 1e3
    else:
        run()
        passed = time.perf_counter() - ordered - ordering
    record.mover.drain()
    return passed, ordering


def moved(record: MovingRecord, repeats: int) -> dict[str, Spread]:
    """Seconds that the record takes to leave and to come while nothing else happens."""
    found: dict[str, list[float]] = {OUT: [], INTO: []}
    for _ in range(repeats):
        for name, order in ((OUT, record.leave), (INTO, record.arrive)):
            if name == INTO:
                record.prepare()
            began = time.perf_counter()
            order()
            record.mover.drain()
            found[name].append(time.perf_counter() - began)
    return {name: Spread.of(values) for name, values in found.items()}


@click.command(help="Passes of a model beside records that are copied between pool and host memory.")
@device_option
@click.option("--tokens", type=click.IntRange(1), default=16_384, show_default=True, help="Record's length.")
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True)
@click.option("--json", "json_path", type=REPORT_FILE, help="Also write results and settings here.")
@reporting_failures
def copies(device: torch.device, tokens: int, repeats: int, json_path: Path | None) -> None:
    check_outputs(json_path, None)
    real = device.type == "cuda"
    shape, prompt = (REAL, Composition(4, 2048, 64)) if real else (TINY, Composition(2, 40, 8))
    operators, facts, to = operators_for(device), Facts.of(device), report.console()
    to.print(f"{facts}, {operators.name} operators")
    if facts.meaningless:
        to.print(facts.meaningless, style="bold")
    with torch.inference_mode():
        record = MovingRecord(shape, tokens if real else min(tokens, 100), device)
        stack = Stack.random(shape, prompt.tokens, torch.bfloat16, device)
        ids = torch.arange(prompt.tokens, device=device) % shape.vocabulary
        pool = Pool.empty(stack, prompt)
        cold = SegmentPass(stack, prompt, pool, range(prompt.segments), operators)
        warm = ComposedPass(stack, prompt, pool, operators)
        segments = ids[: prompt.segments * prompt.length].view(prompt.segments, prompt.length)
        found = [
            measure(
                record,
                f"{prompt.segments} segments of {prompt.length} captured",
                lambda: cold.run(segments),
                repeats,
            ),
            measure(record, f"{len(warm.positions)} rows composed", lambda: warm.run(ids), repeats),
        ]
        alone = moved(record, repeats)
        record.mover.close()
    out, into = (size(record.buffer.nbytes / alone[name].median) for name in (OUT, INTO))
    to.print(f"a record of {size(record.buffer.nbytes)}; it leaves at {out}/s and comes at {into}/s")
    to.print(_table(found))
    if json_path is not None:
        settings = {"device": facts, "tokens": tokens, "bytes": record.buffer.nbytes, "repeats": repeats}
        results = {"passes": found, "moved": alone}
        report.write_json(json_path, report.report("gpu copies", settings, results, module="benchmarks.gpu"))


def _table(found: list[CopyTimes]) -> Any:
    rows = []
    for times in found:
        for name, spread in times.passes.items():
            ratio = f"{spread.over(times.passes[ALONE]).median:.3f}"
            ordering = "" if name == ALONE else seconds(times.ordering[name].median)
            rows.append((times.case, name, seconds(spread.median), ratio, ordering))
    columns = ("pass", "", "on the device", "/ alone", "host, to order it")
    return report.table("passes beside copies", columns, rows)
