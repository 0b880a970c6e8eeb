"""A disk tier's folder that an earlier version wrote is read, record by record.

``written_before/`` holds a leading and an interior record, as the version before asynchronous tiers wrote
them.  A change that cannot read them needs another version of the format.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from vllm_hypic.config.store import StoreConfig
from vllm_hypic.store.build import build_store
from vllm_hypic.store.cache_value import CacheValue, object_name
from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.protocol import Verdict
from vllm_hypic.store.record import Expected, Fault, SectionLimit, open_record
from vllm_hypic.store.tiers.disk import DiskTier

from .awkward_tiers import PATIENCE_S, wait_for

FOLDER = Path(__file__).parent / "written_before"
KEYS = [hashlib.sha256(f"segment {i}".encode()).hexdigest() for i in range(2)]


def expected(key: str, leading: bool) -> Expected:
    sections = [
        SectionLimit("layer.0/kv", "bfloat16", (5, 2, 4)),
        SectionLimit("layer.1/s", "float32", (2, 3, 3)),
    ]
    if not leading:
        sections.insert(1, SectionLimit("layer.1/t", "float16", (4, 3, 3), up_to=True))
    return Expected("ab" * 32, key, 0, 1, 5, leading, tuple(sections))


def test_its_records_are_taken_whole(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "tier")
    tier = {"type": "disk", "path": str(tmp_path / "tier"), "bytes": "1MB"}
    store = build_store(StoreConfig.from_mapping({"tiers": [tier]}), "golden")
    assert store is not None
    taken: list[str] = []

    for key, leading in zip(KEYS, (True, False), strict=True):

        def reader(data: memoryview, key: str = key, leading: bool = leading) -> Verdict:
            record = open_record(data, expected(key, leading))
            if isinstance(record, Fault):
                return record.verdict
            for section, view in record.sections.items():
                assert view == hashlib.shake_256(f"{key} {section}".encode()).digest(view.nbytes)
            taken.append(key)
            return Verdict.TAKEN

        assert store.holds(object_name(key))
        assert store.prefetch(object_name(key), expected(key, leading).max_nbytes, reader)
    reports = []
    wait_for(lambda: reports.extend(store.poll()) or len(reports) == 2, "both reports")
    assert {(r.name, r.tier) for r in reports} == {(object_name(key), "disk") for key in KEYS}
    assert sorted(taken) == sorted(KEYS) and store.drain(PATIENCE_S)
    stats = store.stats().tiers["disk"]
    assert (stats.hits, stats.corrupt, stats.errors, stats.objects) == (2, 0, 0, 2)
    store.close()


def test_their_cache_values_are_known_after_the_restart(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "tier")
    tier = DiskTier("disk", tmp_path / "tier", 1 << 20, LruPolicy())
    tier.open()
    values = {held.name: held.value for held in tier.held()}
    sizes = {file.stem: file.stat().st_size - 64 for file in FOLDER.glob("?/?/*.hypic")}
    assert values == {
        object_name(key): CacheValue(7 + i, 1.5e9 + i, sizes[object_name(key)]) for i, key in enumerate(KEYS)
    }
    tier.check_integrity()
    tier.close()
