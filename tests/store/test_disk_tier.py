"""The disk tier keeps the contract, also beside other processes, and while others read."""

import os
import shutil
import threading

import pytest

from vllm_hypic.store.tiers.base import Tier, TierFull
from vllm_hypic.store.tiers.disk_files import PARTIAL, ObjectFiles

from .budget_contract import BudgetContract
from .disks import OpenTier, place
from .tier_contract import (
    CountsItsBytes,
    HeedsPins,
    ListsItsObjects,
    SurvivesRestart,
    TellsAbsence,
    content,
    got,
    in_threads,
    name,
    put,
    value,
    view,
)


class DiskContract(SurvivesRestart, CountsItsBytes, ListsItsObjects, HeedsPins):
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


class TestContract(TellsAbsence, DiskContract):
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


@pytest.fixture
def tier(on_disk):
    return on_disk()


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


def test_objects_of_others_keep_the_reader_within_its_budget(tier, beside, tmp_path):
    put(beside, 1, 600)
    data = put(tier, 2, 600)
    assert got(beside, 2) == data
    assert beside.used()[0] == 600
    assert not place(tmp_path, 1).exists()


def test_an_object_of_others_that_has_no_room_is_read_all_the_same(tier, on_disk):
    beside = on_disk()
    put(beside, 1, 600)
    beside.pin(name(1))
    data = put(tier, 2, 600)
    assert got(beside, 2) == data
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
    data = put(tier, 2, 300)
    assert got(tier, 2) == data


# -- what readers see meanwhile


def test_an_object_that_is_deleted_while_it_is_read(tier, monkeypatch):
    data = put(tier, 1, 300)
    monkeypatch.setattr(ObjectFiles, "note_use", staticmethod(lambda fd: tier.delete(name(1))))
    assert got(tier, 1) == data
    assert not tier.may_hold(name(1)) and tier.used()[0] == 0


def test_an_object_that_is_replaced_while_it_is_read(tier, monkeypatch):
    data = put(tier, 1, 300)

    def replace(fd: int) -> None:
        tier.delete(name(1))
        tier.put(name(1), view(content(2, 400)), value(400))

    monkeypatch.setattr(ObjectFiles, "note_use", staticmethod(replace))
    assert got(tier, 1) == data
    assert tier.used()[0] == 400


def test_an_object_is_not_visible_before_it_is_complete(tier, monkeypatch):
    """Held up before the rename: a reader sees nothing, and does not wait."""
    reached, go_on = threading.Event(), threading.Event()
    real = os.rename

    def wait(source, target):
        reached.set()
        assert go_on.wait(30)
        real(source, target)

    monkeypatch.setattr(os, "rename", wait)
    thread = threading.Thread(target=put, args=(tier, 1, 300), daemon=True)
    thread.start()
    assert reached.wait(30)
    assert got(tier, 1) is None and not tier.may_hold(name(1))
    assert tier.used()[0] == 0
    with pytest.raises(TierFull, match="being written"):
        put(tier, 2, 701)
    go_on.set()
    thread.join(30)
    assert got(tier, 1) == content(1, 300)
