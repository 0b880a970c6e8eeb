"""Engines of different models in one folder: emptying one's tier leaves the others' records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_hypic.config.store import StoreConfig
from vllm_hypic.store.build import build_store
from vllm_hypic.store.cache_value import CacheValue, ObjectName, object_name
from vllm_hypic.store.record import RecordHeader, Section, begin_record, record_nbytes, seal_record
from vllm_hypic.store.tiered import TieredStore

from .awkward_tiers import PATIENCE_S, wait_for

MINE, OTHERS = "ab" * 32, "cd" * 32


def opened(folder: Path, namespace: str) -> TieredStore:
    tier = {"type": "disk", "path": str(folder), "bytes": "1MB", "shared": True}
    store = build_store(StoreConfig.from_mapping({"tiers": [tier]}), namespace)
    assert store is not None
    return store


def save(store: TieredStore, namespace: str, text: str, sections: int = 1) -> ObjectName:
    """Store one record, whose header is the longer the more sections it has; its name."""
    key = hashlib.sha256(f"{namespace} {text}".encode()).hexdigest()
    parts = tuple(Section(f"layer.{i}/k", "bfloat16", (2,)) for i in range(sections))
    header = RecordHeader(namespace, key, 0, 1, 3, True, 3, 1e9, parts)
    reservation = store.reserve(object_name(key), CacheValue(3, 1e9, record_nbytes(header)))
    assert reservation is not None
    begin_record(reservation.buffer, header)
    store.commit(reservation, seal_record)
    assert store.drain(PATIENCE_S)
    return object_name(key)


def files(folder: Path) -> set[str]:
    return {file.name.removesuffix(".hypic") for file in folder.glob("?/?/*")}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[TieredStore, TieredStore]]:
    mine, others = opened(tmp_path, MINE), opened(tmp_path, OTHERS)
    yield mine, others
    mine.close()
    others.close()


def test_clear_leaves_the_records_of_other_models(
    stores: tuple[TieredStore, TieredStore], tmp_path: Path
) -> None:
    """Also those that it found when it was opened, and those with long headers."""
    mine, others = stores
    gone = {save(mine, MINE, "a"), save(mine, MINE, "long", sections=2000)}
    kept = {save(others, OTHERS, "a"), save(others, OTHERS, "long", sections=2000)}
    late = opened(tmp_path, MINE)  # has found all four
    assert files(tmp_path) == gone | kept
    late.clear()
    wait_for(lambda: files(tmp_path) == kept, "its own records' end")
    assert late.drain(PATIENCE_S) and files(tmp_path) == kept
    late.close()


def test_clear_leaves_what_it_cannot_read(stores: tuple[TieredStore, TieredStore], tmp_path: Path) -> None:
    """An object that is no record, or a damaged one, may be anybody's: whoever asks for it deletes it."""
    mine, _ = stores
    gone, damaged = save(mine, MINE, "a"), save(mine, MINE, "b")
    file = tmp_path / damaged[0] / damaged[1] / f"{damaged}.hypic"
    file.write_bytes(file.read_bytes()[:70])
    mine.clear()
    wait_for(lambda: gone not in files(tmp_path), "the sound record's end")
    assert mine.drain(PATIENCE_S) and files(tmp_path) == {damaged}
