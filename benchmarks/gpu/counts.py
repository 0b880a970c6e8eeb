"""What an H100 or H200 has to do in a scan of segments and in a tile of span attention: counted.

A step takes the longest of three: what a program waits for (products that add to one another, trips through
shared memory), what the tensor cores of a multiprocessor do for all of its programs, what these read from L2.
``docs/benchmarks/gpu.md`` says what follows, and how far it depends on the rates assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import click

from ..lib import report

CHUNK = 32
"""Rows of a chunk of segments."""
COLUMNS, THREADS = 16, 64
"""Of a state, and threads, of a program of the scan."""


@dataclass(frozen=True)
class Machine:
    """A multiprocessor's rates, per clock cycle: operations of TF32 (`mma.sync`) and bf16 products (`wgmma`),
    other operations in float32, exponentials, bytes read from L2 and to or from shared memory."""

    processors: int = 132
    hertz: float = 1.7e9
    tf32: float = 300e12 / 132 / 1.7e9
    bf16: float = 800e12 / 132 / 1.7e9
    plain: float = 128
    exponentials: float = 16
    l2: float = 5.5e12 / 132 / 1.7e9
    shared: float = 128
    wait: float = 25
    """From one product to the next that adds to its result; a quarter of a trip through shared memory."""
    registers: int = 65_536


H100 = Machine()
SLOWER = replace(H100, wait=50)


@dataclass(frozen=True)
class Step:
    """A program's step: cycles that it waits, operations, bytes read."""

    waits: float
    operations: float
    bytes: float


@dataclass(frozen=True)
class Scan:
    """States [size, size] of `heads` heads a segment, of a gated delta net."""

    heads: int
    size: int
    machine: Machine = H100

    def step(self, deep: float, operations: float, read: float) -> Step:
        """`deep`: products one behind another. Two warps have half of a multiprocessor's tensor cores."""
        waits = max((deep + 16) * self.machine.wait, operations / (self.machine.tf32 / 2))
        return Step(waits, operations, read)

    def chunk(self, outputs: bool) -> Step:
        """D = U - W S by three products of TF32, S' = e^G S + Kd^T D by two; q S and A D by one each."""
        D, c, C = self.size, COLUMNS, CHUNK
        deep = 3 * D / 8 + 2 * C / 8 + (C / 8 if outputs else 0)
        operations = 2 * C * D * c * (5 + outputs) + 2 * C * C * c * outputs
        read = C * D * (4 + 2) + (C * D * 2 + C * C * 4 + C * c * 6 if outputs else 0)
        return self.step(deep, operations, read)

    def join(self) -> Step:
        """S' = T S + S_zero with a group's T and S_zero."""
        D, c = self.size, COLUMNS
        return self.step(3 * D / 8, 6 * D * D * c, 4 * (D * D + 2 * D * c))

    def cycles(self, parts: Sequence[tuple[Step, int]]) -> float:
        """One step of so many programs of each kind, side by side; registers allow so many at a time."""
        m = self.machine
        resident = m.processors * (m.registers // (255 * THREADS))
        turns = ceil(sum(n for _, n in parts) / resident)
        operations = sum(step.operations * n for step, n in parts) / m.tf32
        read = sum(step.bytes * n for step, n in parts) / m.l2
        waits = max(step.waits for step, n in parts if n) * turns
        return max(waits, operations / m.processors, read / m.processors)

    def serial(self, chunks: int, segments: int) -> float:
        """Seconds: programs of S and of T go through all chunks."""
        n = segments * self.heads * self.size // COLUMNS
        return chunks * self.cycles([(self.chunk(True), n), (self.chunk(False), n)]) / self.machine.hertz

    def grouped(self, chunks: int, segments: int, group: int) -> float:
        """Seconds: T and S_zero of groups of so many chunks; S and T across groups; S again, with outputs."""
        n, groups = segments * self.heads * self.size // COLUMNS, ceil(chunks / group)
        own = group * self.cycles([(self.chunk(False), groups * 2 * n)])
        across = groups * self.cycles([(self.join(), 2 * n)])
        outputs = group * self.cycles([(self.chunk(True), groups * n)])
        return (own + across + outputs) / self.machine.hertz

    def best(self, chunks: int, segments: int) -> tuple[float, int]:
        """The least `grouped`, and its group."""
        sizes = [size for size in (4, 8, 16, 32, 64, 128) if size < chunks]
        return min((self.grouped(chunks, segments, size), size) for size in sizes)


LENGTHS = ((1, 1024), (1, 4096), (1, 16_384), (4, 4096))
"""Segments of a pass, and rows of each."""


def scan_rows() -> list[tuple[str, ...]]:
    rows = []
    for size in (64, 128):
        for heads in (4, 8, 16, 32):
            gains = []
            for machine in (H100, SLOWER):
                scan = Scan(heads, size, machine)
                both = [(scan.serial(n // CHUNK, s), scan.best(n // CHUNK, s)) for s, n in LENGTHS]
                gains += [f"{serial / two:.2f}" for serial, (two, _) in both]
                if machine is H100:
                    times = [f"{1e6 * serial:.0f} / {1e6 * two:.0f} ({g})" for serial, (two, g) in both]
            rows.append((f"{heads} of {size}", *times, " ".join(gains[4:])))
    return rows


@dataclass(frozen=True)
class Tile:
    """`rows` folded rows against `columns` of K and V of heads of `size`, `rotary` of them rotated."""

    size: int
    rotary: int
    columns: int
    rows: int = 128

    def cycles(self, machine: Machine = H100) -> dict[str, float]:
        """By what they are for, of one multiprocessor."""
        scores, m = self.rows * self.columns, machine
        pairs = self.columns * self.rotary / 2
        return {
            "products": 4 * scores * self.size / m.bf16,
            "exponentials": scores / m.exponentials,
            # Scale, largest, difference, sum, rounding; a comparison and a choice for masks.
            "softmax": 6 * scores / m.plain,
            "masks": 2 * scores / m.plain,
            "sums scaled": self.rows * self.size / m.plain,
            # Widened, four products, two sums, rounded; K goes through registers and back into shared memory.
            "rotation": 10 * pairs / m.plain + 2 * 4 * pairs / m.shared + 4 * m.wait,
            "K and V from L2": 4 * self.columns * self.size / m.l2,
        }


TILES = (Tile(64, 64, 64), Tile(128, 128, 64), Tile(256, 64, 32))


def tile_rows() -> list[tuple[str, ...]]:
    rows = []
    for tile in TILES:
        parts = tile.cycles()
        products, read = parts["products"], parts.pop("K and V from L2")
        behind = products / sum(parts.values())
        rows.append(
            (
                f"{tile.size} ({tile.rotary})",
                *(f"{value:.0f}" for value in parts.values()),
                f"{read:.0f}",
                f"{100 * behind:.0f} %",
                f"{100 * products / max(products, read, sum(parts.values()) - products):.0f} %",
            )
        )
    return rows


def tables() -> list[Any]:
    lengths = [f"{segments} x {tokens}" for segments, tokens in LENGTHS]
    scan = "scan of a layer: us in one level / in two (chunks a group); its gains if waits are twice as long"
    tile = "prefill, cycles of a tile of 128 folded rows: share of products, one by one and side by side"
    parts = list(TILES[0].cycles())
    return [
        report.table(scan, ("heads", *lengths, "gains"), scan_rows()),
        report.table(tile, ("heads", *parts, "one by one", "side by side"), tile_rows()),
    ]


@click.command
def counts() -> None:
    """What scans and tiles of attention have to do on an H100 or H200: counted, no GPU is needed."""
    console = report.console()
    for table in tables():
        console.print(table)
