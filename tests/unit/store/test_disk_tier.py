"""The disk tier keeps the contract, also beside other processes, and while others read; its folder may be one
that an earlier version wrote, or that engines of other models use."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_hypic.config.store import StoreConfig
from vllm_hypic.store.build import build_store
from vllm_hypic.store.protocol import CacheValue, ObjectName, Verdict, object_name
from vllm_hypic.store.record import Expected, Fault, Section, SectionLimit, open_record
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.base import Tier, TierFull
from vllm_hypic.store.tiers.disk_files import PARTIAL, ObjectFiles

from . import tier_contract as contract
from .awkward_tiers import PATIENCE_S, Hang, wait_for
from .budget_contract import BudgetContract
from .conftest import HEAD_BYTES, OpenTier, place
from .test_record import HEADER, written
from .tier_contract import content, got, in_threads, name, put, value, view


class DiskContract(contract.SurvivesRestart, contract.LocalContract):
    shared = durable = False

    @pytest.fixture
    def tier(self, on_disk: OpenTier):
        return on_disk(6 << 20, shared=self.shared, durable=self.durable)

    @pytest.fixture
    def reopen(self, on_disk: OpenTier):
        def reopen(tier: Tier) -> Tier:
            tier.close()
            return on_disk(6 << 20, shared=self.shared, durable=self.durable)

        return reopen


class TestContract(contract.TellsAbsence, DiskContract):
    """A folder of its own."""


class TestSharedContract(DiskContract):
    """A folder that others may write to: nothing is denied without a look."""

    shared = True


class TestDurableContract(TestContract):
    """The same with ``fsync``, once."""

    durable = True


class TestBudget(BudgetContract):
    @pytest.fixture
    def small(self, on_disk: OpenTier):
        return on_disk(self.BUDGET)


# -- several processes in one folder


@pytest.fixture
def beside(tier, on_disk):
    """A second tier in the folder of the first; only its books must agree with the files in the end."""
    beside = on_disk()
    yield beside
    beside.check_integrity()


def test_objects_of_others_are_found_and_booked(tier, on_disk):
    beside = on_disk(shared=True)
    data = put(tier, 1, 300)
    assert beside.may_hold(name(1))
    assert beside.used()[0] == 0
    assert got(beside, 1) == data
    assert beside.used()[0] == 300
    beside.check_integrity()


def test_read_objects_of_others_expire(tier, on_disk, clock, tmp_path):
    beside = on_disk(shared=True, ttl_s=100.0)
    put(tier, 1, 300)
    clock.advance(30)
    assert got(beside, 1) is not None
    assert [held.expires for held in beside.held()] == [clock() + 100]
    clock.advance(100)
    assert got(beside, 1) is None and not place(tmp_path, 1).exists()
    assert got(tier, 1) is None


def test_objects_of_others_keep_the_reader_within_its_budget(tier, beside, tmp_path):
    put(beside, 1, 600)
    assert put(tier, 2, 600) == got(beside, 2)
    assert beside.used()[0] == 600
    assert not place(tmp_path, 1).exists()


def test_an_object_of_others_that_has_no_room_is_read_all_the_same(tier, on_disk):
    beside = on_disk()
    put(beside, 1, 600)
    beside.pin(name(1))
    assert put(tier, 2, 600) == got(beside, 2)
    assert {h.name for h in beside.held()} == {name(1)}


def test_without_sharing_the_folder_is_not_asked(tier, on_disk):
    alone = on_disk(shared=False)
    data = put(tier, 1, 300)
    assert not alone.may_hold(name(1))
    assert got(alone, 1) == data
    assert alone.may_hold(name(1))


def test_what_others_delete_is_a_miss_and_leaves_the_books(tier, beside):
    put(tier, 1, 300)
    assert got(beside, 1) is not None
    tier.delete(name(1))
    assert got(beside, 1) is None
    assert not beside.may_hold(name(1))
    assert beside.used()[0] == 0


def test_what_others_deleted_can_be_put_and_evicted(tier, beside):
    for i in range(2):
        put(tier, i, 500)
        assert got(beside, i) is not None
    tier.clear()
    put(beside, 0, 500)
    put(beside, 2, 500)
    assert got(beside, 0) == content(0, 500) and got(beside, 1) is None


def test_what_others_put_is_kept(tier, beside):
    data = put(tier, 1, 300)
    beside.put(name(1), view(content(2, 400)), value(400))
    assert got(tier, 1) == data and got(beside, 1) == data


def test_what_others_put_first_is_found_without_sharing(on_disk):
    first, later = on_disk(), on_disk()
    data = put(first, 1, 300)
    later.put(name(1), view(content(2, 400)), value(400))
    assert later.may_hold(name(1)) and got(later, 1) == data and later.used()[0] == 300


def test_a_cut_file_of_others_is_written_anew(on_disk, tmp_path):
    first, later = on_disk(), on_disk()
    put(first, 1, 300)
    os.truncate(place(tmp_path, 1), HEAD_BYTES + 100)
    assert put(later, 1, 300) == got(later, 1)


@pytest.mark.parametrize(
    ("call", "error", "stays"), [("open", errno.EACCES, True), ("preadv", errno.EIO, False)]
)
def test_a_file_that_cannot_be_read_is_a_miss_and_no_fault_of_the_tier(
    tier, tmp_path, monkeypatch, call, error, stays
):
    put(tier, 1, 300)
    as_before = getattr(os, call)

    def refuses(about: object, *rest: object) -> object:
        if call == "open" and about != place(tmp_path, 1):
            return as_before(about, *rest)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuses)
        assert got(tier, 1) is None
    assert (got(tier, 1) is not None) == stays and tier.counts.damaged == (not stays)


def test_another_size_under_the_same_name_is_booked(tier, beside):
    put(beside, 1, 300)
    tier.delete(name(1))
    tier.put(name(1), view(content(2, 500)), value(500))
    assert got(beside, 1) == content(2, 500)
    assert beside.used()[0] == 500


def test_two_processes_at_once(on_disk, tmp_path):
    """Both put, read, delete the same names: what is read is whole."""
    tiers = [on_disk(5000) for _ in range(2)]

    def work(seed: int) -> None:
        tier = tiers[seed % 2]
        for n in range(60):
            i = (7 * n + 3 * seed) % 20
            put(tier, i, 400 + i)
            assert got(tier, i) in (None, content(i, 400 + i))
            if n % 5 == 0:
                tier.delete(name(i))

    in_threads(work)
    for tier in tiers:
        assert all(got(tier, i) in (None, content(i, 400 + i)) for i in range(20))
        assert tier.used()[0] <= 5000
    assert not list((tmp_path / PARTIAL).iterdir())
    on_disk(1 << 20).check_integrity()


def test_a_folder_that_somebody_emptied(tier, tmp_path):
    put(tier, 1, 300)
    shutil.rmtree(tmp_path)
    assert got(tier, 1) is None and tier.used()[0] == 0
    assert put(tier, 2, 300) == got(tier, 2)


# -- what readers see meanwhile


@pytest.mark.parametrize("then", [[], [400]], ids=["deleted", "replaced"])
def test_an_object_that_leaves_while_it_is_read(tier, monkeypatch, then):
    data = put(tier, 1, 300)

    def leave(fd: int) -> None:
        tier.delete(name(1))
        for nbytes in then:
            tier.put(name(1), view(content(2, nbytes)), value(nbytes))

    monkeypatch.setattr(ObjectFiles, "note_use", staticmethod(leave))
    assert got(tier, 1) == data
    assert tier.may_hold(name(1)) is bool(then) and tier.used()[0] == sum(then)


def test_an_object_is_not_visible_before_it_is_complete(tier, monkeypatch):
    """Held up before the rename: a reader sees nothing, and does not wait."""
    hang, real = Hang(), os.rename

    def wait(source, target):
        hang()
        real(source, target)

    monkeypatch.setattr(os, "rename", wait)
    thread = threading.Thread(target=put, args=(tier, 1, 300), daemon=True)
    thread.start()
    hang.wait_until_entered()
    assert got(tier, 1) is None and not tier.may_hold(name(1))
    assert tier.used()[0] == 0
    with pytest.raises(TierFull, match="being written"):
        put(tier, 2, 701)
    hang.release()
    thread.join(30)
    assert got(tier, 1) == content(1, 300)


# -- a folder that an earlier version wrote

WRITTEN_BEFORE = Path(__file__).parent / "written_before"
"""A leading and an interior record, as the version before asynchronous tiers wrote them.  A change that
cannot read them needs another version of the format."""
KEYS = [hashlib.sha256(f"segment {i}".encode()).hexdigest() for i in range(2)]


def store_in(folder: Path, namespace: str, rank: int = 0, world: int = 1, **options: object) -> TieredStore:
    tier = {"type": "disk", "path": str(folder), "bytes": "1MB", **options}
    store = build_store(StoreConfig.from_mapping({"tiers": [tier]}), namespace, rank, world)
    assert store is not None
    return store


def expected(key: str, leading: bool) -> Expected:
    sections = [
        SectionLimit("layer.0/kv", "bfloat16", (5, 2, 4)),
        SectionLimit("layer.1/s", "float32", (2, 3, 3)),
    ]
    if not leading:
        sections.insert(1, SectionLimit("layer.1/t", "float16", (4, 3, 3), up_to=True))
    return Expected("ab" * 32, key, 0, 1, 5, leading, tuple(sections))


def test_records_of_an_earlier_version_are_taken_whole(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN_BEFORE, tmp_path / "tier")
    store = store_in(tmp_path / "tier", "golden")
    taken: list[str] = []

    for key, leading in zip(KEYS, (True, False), strict=True):

        def reader(data: memoryview, key: str = key, leading: bool = leading) -> Verdict:
            record = open_record(data, expected(key, leading))
            if isinstance(record, Fault):
                return record.verdict
            for section, part in record.sections.items():
                assert part == hashlib.shake_256(f"{key} {section}".encode()).digest(part.nbytes)
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


def test_cache_values_of_an_earlier_version_are_known(on_disk: OpenTier, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN_BEFORE, tmp_path, dirs_exist_ok=True)
    values = {held.name: held.value for held in on_disk(1 << 20).held()}
    sizes = {file.stem: file.stat().st_size - HEAD_BYTES for file in WRITTEN_BEFORE.glob("?/?/*.hypic")}
    assert values == {
        object_name(key): CacheValue(7 + i, 1.5e9 + i, sizes[object_name(key)]) for i, key in enumerate(KEYS)
    }


# -- engines of different models in one folder: emptying one's tier leaves the others' records

MINE, OTHERS = "ab" * 32, "cd" * 32


def save(
    store: TieredStore, namespace: str, text: str, sections: int = 1, rank: int = 0, world: int = 1
) -> ObjectName:
    """Store one record, whose header is the longer the more sections it has; its name."""
    key = hashlib.sha256(f"{namespace} {text}".encode()).hexdigest()
    parts = tuple(Section(f"layer.{i}/k", "bfloat16", (2,)) for i in range(sections))
    data = written(replace(HEADER, namespace=namespace, key=key, sections=parts))
    name = object_name(key, rank, world)
    reservation = store.reserve(name, CacheValue(3, 1e9, data.nbytes))
    assert reservation is not None
    reservation.buffer[:] = data
    store.commit(reservation)
    assert store.drain(PATIENCE_S)
    return name


def files(folder: Path) -> set[str]:
    return {file.name.removesuffix(".hypic") for file in folder.glob("?/?/*")}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[TieredStore, TieredStore]]:
    mine, others = (store_in(tmp_path, namespace, shared=True) for namespace in (MINE, OTHERS))
    yield mine, others
    mine.close()
    others.close()


def test_clear_leaves_records_of_others(stores: tuple[TieredStore, TieredStore], tmp_path: Path) -> None:
    """Also those that it found when it was opened, and those with long headers."""
    mine, others = stores
    gone = {save(mine, MINE, "a"), save(mine, MINE, "long", sections=2000)}
    kept = {save(others, OTHERS, "a"), save(others, OTHERS, "long", sections=2000)}
    late = store_in(tmp_path, MINE, shared=True)  # has found all four
    assert files(tmp_path) == gone | kept
    late.clear()
    wait_for(lambda: files(tmp_path) == kept, "its own records' end")
    assert late.drain(PATIENCE_S) and files(tmp_path) == kept
    late.close()


@pytest.mark.parametrize(("world", "left"), [(2, 12), (4, 6)], ids=["as before", "with other ranks"])
def test_each_rank_has_its_budget_after_a_restart(tmp_path: Path, world: int, left: int) -> None:
    """A start with another number of ranks evicts files of the former ranks down to its own budget."""
    for rank in range(2):
        store = store_in(tmp_path, MINE, rank, 2)
        for i in range(6):
            save(store, MINE, str(i), rank=rank, world=2)
        store.close()
    sizes = [file.stat().st_size - HEAD_BYTES for file in tmp_path.glob("?/?/*")]
    assert len(sizes) == 12
    for rank in range(world):
        store_in(tmp_path, MINE, rank, world, bytes=sum(sizes) // 2).close()
    assert len(files(tmp_path)) == left


def test_clear_leaves_what_it_cannot_read(stores: tuple[TieredStore, TieredStore], tmp_path: Path) -> None:
    """An object that is no record, or a damaged one, may be anybody's: whoever asks for it deletes it."""
    mine, _ = stores
    gone, damaged = save(mine, MINE, "a"), save(mine, MINE, "b")
    file = tmp_path / damaged[0] / damaged[1] / f"{damaged}.hypic"
    file.write_bytes(file.read_bytes()[:70])
    mine.clear()
    wait_for(lambda: gone not in files(tmp_path), "the sound record's end")
    assert mine.drain(PATIENCE_S) and files(tmp_path) == {damaged}


def test_cut_files_are_counted(stores: tuple[TieredStore, TieredStore], tmp_path: Path) -> None:
    mine, _ = stores
    cut = save(mine, MINE, "a")
    file = tmp_path / cut[0] / cut[1] / f"{cut}.hypic"
    file.write_bytes(file.read_bytes()[:-1])
    assert mine.prefetch(cut, 1 << 20, lambda data: Verdict.TAKEN)
    wait_for(mine.poll, "the end of the fetch")
    other = save(mine, MINE, "b")  # the counts of the tier are read after a write
    assert files(tmp_path) == {other} and mine.stats().tiers["disk"].corrupt == 1
