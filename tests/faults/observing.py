"""What a server says of its tiers, and what lies in them."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.serving import Server

from .asking import BOUND_S, nudge

_PREFIX = "vllm:hypic_tier_"
_QUIET_S = 1.5
"""The engine reports once a second; after so long without a change there is nothing to come."""
FILE_HEAD = 64
"""Bytes of a file of the disk tier before the record."""

TierCounts = dict[str, dict[str, float]]
"""By tier: the values of ``connector/stats.py`` by their names there."""


def tiers(server: Server) -> TierCounts:
    text = httpx.get(f"{server.url}/metrics", timeout=BOUND_S).raise_for_status().text
    found: TierCounts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and not sample.name.endswith(("_created", "_bucket")):
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                found.setdefault(sample.labels["tier"], {})[name] = sample.value
    return found


def tiers_when(server: Server, met: Callable[[TierCounts], bool], what: str) -> TierCounts:
    """The first report of the tiers that ``met`` accepts; the engine is kept going meanwhile."""
    deadline = time.monotonic() + BOUND_S
    while True:
        nudge(server)
        found = tiers(server)
        if found and met(found):
            return found
        assert time.monotonic() < deadline, f"not within {BOUND_S:g} s: {what}: {found}"
        time.sleep(0.2)


def settled(server: Server) -> TierCounts:
    """Once nothing runs, waits, is held, or is on its way to a tier or from one."""
    levels = ("pinned", "waiting", "store_queued_bytes", "store_inflight")
    names = ("vllm:num_requests_running", *(f"vllm:hypic_{level}" for level in levels))
    last: TierCounts = {}
    since = looked = time.monotonic()

    def quiet(found: TierCounts) -> bool:
        """The nudge before this look began so much later than the last change."""
        nonlocal last, since, looked
        began, looked = looked, time.monotonic()
        if found != last or any(map(server.metrics().__getitem__, names)):
            last, since = found, looked
        return began - since > _QUIET_S

    return tiers_when(server, quiet, f"{names} are 0")


def files_of(folder: Path) -> dict[str, Path]:
    """Committed records of a disk tier by name, wherever they lie."""
    return {path.stem: path for path in folder.glob("?/?/*.hypic")}


def partials_of(folder: Path) -> list[str]:
    """Files that are being written."""
    return [path.name for path in (folder / "partial").glob("*")]


def check_record(data: bytes) -> None:
    """``AssertionError`` unless it is a whole record: read by its description, not by the reader's code."""
    assert data[:8] == b"\x89HYPIC\r\n", data[:8]
    body, payload = int.from_bytes(data[12:16], "little"), int.from_bytes(data[16:24], "little")
    start = -(-(32 + body) // 64) * 64
    assert len(data) == start + payload, (len(data), start, payload)
    assert int.from_bytes(data[24:28], "little") == zlib.crc32(data[start:])
