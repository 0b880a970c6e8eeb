"""What every tier must do, sentence by sentence of ``store/tiers/base.py``.

A tier's test class inherits what its tier promises and provides the fixtures ``tier`` and ``reopen``.
:class:`TierContract` is what all promise; one of :class:`SurvivesRestart` and :class:`ForgetsAtRestart` holds
for each; :class:`CountsItsBytes`, :class:`ListsItsObjects`, :class:`TellsAbsence` and :class:`HeedsPins` for
some.  They bring tests of their own, and more to look at for all tests.  ``budget_contract.py`` has another,
for tiers that keep a budget.
"""

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from vllm_hypic.store.protocol import CacheValue, ObjectName, object_name
from vllm_hypic.store.tiers.base import Held, Tier, TierError, TierFull

SIZES = [1, 63, 4096, 5_000_000]
THREADS = 8


def name(i: int) -> ObjectName:
    """The i-th object's name."""
    return object_name(hashlib.sha256(str(i).encode()).hexdigest())


def content(i: int, nbytes: int) -> bytes:
    """The i-th object's bytes."""
    return np.random.default_rng(i).bytes(nbytes)


def view(data: bytes) -> memoryview:
    """A fresh buffer: tiers may keep what they are given."""
    return memoryview(bytearray(data))


def value(nbytes: int, tokens: int = 100) -> CacheValue:
    return CacheValue(tokens, 2.5e9 * tokens, nbytes)


def put(tier: Tier, i: int, nbytes: int, tokens: int = 100) -> bytes:
    """Put the i-th object; returns its bytes."""
    data = content(i, nbytes)
    tier.put(name(i), view(data), value(nbytes, tokens))
    return data


def got(tier: Tier, i: int, limit: int = 1 << 30) -> bytes | None:
    found = tier.get(name(i), limit)
    return None if found is None else bytes(found)


def in_threads(work: Callable[[int], None]) -> None:
    """Run ``work`` with seeds, at once; nothing that it raises is lost."""
    faults: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            work(seed)
        except BaseException as e:
            faults.append(e)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    assert not faults, faults


class TierContract:
    """Fixtures of the subclass:

    ``tier``: open and empty, with room for 6 MiB at least.
    ``reopen``: ``reopen(tier)`` closes it and returns another one, open, at the same place.
    ``clock``: the tier's time (``conftest.ManualClock``; ``WallClock`` where time cannot be set).
    """

    tick = 1.0
    """Seconds that expiry is tested with; large enough for the tier's resolution."""

    @pytest.fixture(autouse=True)
    def _audit(self, tier: Tier):
        yield
        getattr(tier, "check_integrity", lambda: None)()

    # -- what is looked at: contracts of some tiers look closer

    def assert_may_be_absent(self, tier: Tier, i: int) -> None:
        """``may_hold`` of an absent object."""
        tier.may_hold(name(i))

    def assert_absent(self, tier: Tier, i: int) -> None:
        self.assert_may_be_absent(tier, i)
        assert tier.first([name(i)]) is None
        assert got(tier, i) is None

    def assert_lists(self, tier: Tier, objects: list[Held]) -> None:
        """``held`` of a tier with exactly these objects."""
        assert tier.held() is None

    def assert_uses(self, tier: Tier, nbytes: int) -> None:
        """``used`` of a tier whose objects have so many bytes."""
        used, budget = tier.used()
        assert used >= 0 and (budget is None or used <= budget)

    def assert_whole(self, tier: Tier, sizes: dict[int, int]) -> None:
        """Each of the objects is there whole or not at all, and the tier says which."""
        there = {i: data for i in sizes if (data := got(tier, i)) is not None}
        assert all(data == content(i, sizes[i]) for i, data in there.items())
        self.assert_lists(tier, [Held(name(i), value(sizes[i])) for i in there])
        self.assert_uses(tier, sum(sizes[i] for i in there))

    # -- bytes in, the same bytes out

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_round_trip_is_bit_exact(self, tier: Tier, nbytes: int):
        data = put(tier, 1, nbytes)
        assert tier.may_hold(name(1)) and tier.first([name(2), name(1), name(3)]) == name(1)
        assert got(tier, 1) == data
        assert got(tier, 1, limit=nbytes) == data

    def test_an_existing_object_is_kept(self, tier: Tier):
        data = put(tier, 1, 100)
        tier.put(name(1), view(content(2, 3000)), value(3000))
        assert got(tier, 1) == data
        self.assert_uses(tier, 100)

    def test_ranks_are_different_objects(self, tier: Tier):
        key = "ab" * 32
        for rank in range(3):
            tier.put(object_name(key, rank, 3), view(content(rank, 50)), value(50))
        for rank in range(3):
            found = tier.get(object_name(key, rank, 3), 50)
            assert found is not None and bytes(found) == content(rank, 50)

    def test_a_view_outlives_its_object(self, tier: Tier):
        data = put(tier, 1, 4096)
        found = tier.get(name(1), 4096)
        assert found is not None
        tier.delete(name(1))
        put(tier, 2, 4096)
        tier.clear()
        assert bytes(found) == data

    def test_an_unknown_object(self, tier: Tier):
        put(tier, 1, 100)
        self.assert_absent(tier, 2)
        assert tier.delete(name(2)) is False
        tier.unpin(name(2))
        tier.expire(name(2), None)
        assert got(tier, 1) is not None

    @pytest.mark.parametrize("short_by", [1, 4000])
    def test_longer_than_the_limit_is_deleted(self, tier: Tier, short_by: int):
        put(tier, 1, 4096)
        kept = put(tier, 2, 4096)
        assert got(tier, 1, limit=4096 - short_by) is None
        self.assert_absent(tier, 1)
        assert got(tier, 2) == kept
        self.assert_uses(tier, 4096)

    def test_delete(self, tier: Tier):
        put(tier, 1, 100)
        kept = put(tier, 2, 100)
        self.assert_uses(tier, 200)
        assert tier.delete(name(1)) is True
        self.assert_absent(tier, 1)
        self.assert_uses(tier, 100)
        assert tier.delete(name(1)) is False
        tier.put(name(1), view(content(2, 300)), value(300))
        assert got(tier, 1) == content(2, 300) and got(tier, 2) == kept

    # -- lists and levels

    def test_held_lists_all_objects_with_their_value(self, tier: Tier):
        put(tier, 1, 100, tokens=7)
        put(tier, 2, 200, tokens=8)
        for _ in range(2):
            self.assert_lists(tier, [Held(name(1), value(100, 7)), Held(name(2), value(200, 8))])

    def test_clear(self, tier: Tier):
        put(tier, 1, 100)
        put(tier, 2, 4096)
        tier.pin(name(2))
        tier.clear()
        self.assert_absent(tier, 1)
        self.assert_absent(tier, 2)
        self.assert_uses(tier, 0)
        assert put(tier, 3, 100) == got(tier, 3)

    # -- expiry

    def test_expiry(self, tier: Tier, clock):
        put(tier, 1, 100)
        kept = put(tier, 2, 100)
        at = clock() + 600
        tier.expire(name(1), at)
        assert got(tier, 1) == content(1, 100)
        self.assert_lists(tier, [Held(name(1), value(100), at), Held(name(2), value(100))])
        tier.expire(name(1), clock() + self.tick)
        clock.advance(2 * self.tick)
        self.assert_absent(tier, 1)
        assert got(tier, 2) == kept
        self.assert_uses(tier, 100)

    def test_an_expiry_holds_for_its_object_until_it_is_taken_back(self, tier: Tier, clock):
        """One that has expired makes way."""
        data = {i: put(tier, i, 100) for i in range(3)}
        tier.expire(name(0), clock() + self.tick)
        tier.expire(name(0), None)
        for i in (1, 2):
            tier.expire(name(i), clock() + self.tick)
        tier.delete(name(1))
        put(tier, 1, 100)
        clock.advance(2 * self.tick)
        tier.put(name(2), view(content(3, 200)), value(200))
        assert [got(tier, i) for i in data] == [data[0], data[1], content(3, 200)]
        tier.expire(name(0), clock() - self.tick)
        self.assert_absent(tier, 0)

    def test_a_pin_revives_nothing(self, tier: Tier, clock):
        put(tier, 1, 100)
        tier.expire(name(1), clock() + self.tick)
        clock.advance(2 * self.tick)
        tier.pin(name(1))
        self.assert_absent(tier, 1)

    def test_touching_changes_nothing(self, tier: Tier):
        data = put(tier, 1, 100)
        tier.touch(name(1))
        tier.touch(name(2))
        assert got(tier, 1) == data
        self.assert_absent(tier, 2)

    # -- life

    def test_after_close_operations_fail(self, tier: Tier):
        put(tier, 1, 100)
        tier.close()
        tier.close()
        for operation in (
            lambda: tier.get(name(1), 100),
            lambda: tier.first([name(1)]),
            lambda: put(tier, 2, 100),
            lambda: tier.delete(name(1)),
            tier.clear,
        ):
            with pytest.raises(TierError):
                operation()

    # -- threads

    def test_threads(self, tier: Tier):
        """Mixed operations on few names: every object read is whole, and the books are right in the end."""
        names, sizes = range(30), {i: 100_000 + 10_000 * i for i in range(30)}

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                i, what = rng.choice(names), rng.random()
                if what < 0.4:
                    with contextlib.suppress(TierFull):
                        put(tier, i, sizes[i])
                elif what < 0.8:
                    assert got(tier, i, sizes[i]) in (None, content(i, sizes[i]))
                elif what < 0.9:
                    tier.delete(name(i))
                else:
                    tier.may_hold(name(i))
                    used, budget = tier.used()
                    assert budget is None or used <= budget
                    list(tier.held() or ())

        in_threads(work)
        self.assert_whole(tier, sizes)

    def test_threads_that_put_the_same_object(self, tier: Tier):
        """When any of them returns, the object is there, whole."""

        def work(seed: int) -> None:
            for i in range(10):
                assert put(tier, i, 200_000) == got(tier, i)

        in_threads(work)
        self.assert_uses(tier, 10 * 200_000)


class SurvivesRestart(TierContract):
    def test_restart(self, tier: Tier, reopen: Callable[[Tier], Tier]):
        data = {i: put(tier, i, nbytes, tokens=i) for i, nbytes in enumerate(SIZES[:3])}
        put(tier, 9, 100)
        tier.delete(name(9))
        again = reopen(tier)
        for i in data:
            assert again.may_hold(name(i))
        self.assert_absent(again, 9)
        self.assert_lists(again, [Held(name(i), value(len(d), tokens=i)) for i, d in data.items()])
        self.assert_uses(again, sum(map(len, data.values())))
        assert {i: got(again, i) for i in data} == data
        assert again.delete(name(0)) is True
        self.assert_absent(again, 0)


class ForgetsAtRestart(TierContract):
    def test_restart(self, tier: Tier, reopen: Callable[[Tier], Tier]):
        data = {i: put(tier, i, nbytes, tokens=i) for i, nbytes in enumerate(SIZES[:3])}
        again = reopen(tier)
        for i in data:
            self.assert_absent(again, i)
        self.assert_lists(again, [])
        self.assert_uses(again, 0)


class CountsItsBytes(TierContract):
    """``used`` is exactly the objects' bytes."""

    def assert_uses(self, tier: Tier, nbytes: int) -> None:
        super().assert_uses(tier, nbytes)
        assert tier.used()[0] == nbytes


class ListsItsObjects(TierContract):
    """``held`` lists all objects with the value that was put, also after a restart."""

    @staticmethod
    def listed(tier: Tier) -> list[Held]:
        held = tier.held()
        assert held is not None
        return sorted(held, key=lambda h: h.name)

    def assert_absent(self, tier: Tier, i: int) -> None:
        super().assert_absent(tier, i)
        assert name(i) not in {h.name for h in self.listed(tier)}

    def assert_lists(self, tier: Tier, objects: list[Held]) -> None:
        assert self.listed(tier) == sorted(objects, key=lambda h: h.name)

    def assert_whole(self, tier: Tier, sizes: dict[int, int]) -> None:
        listed = self.listed(tier)
        super().assert_whole(tier, sizes)
        assert self.listed(tier) == listed, "an object was listed that could not be read"


class TellsAbsence(TierContract):
    """``may_hold`` is false for absent objects."""

    def assert_may_be_absent(self, tier: Tier, i: int) -> None:
        assert not tier.may_hold(name(i))


class HeedsPins(TierContract):
    @pytest.mark.parametrize("pinned_first", [False, True])
    def test_expiry_passes_pinned_objects_by(self, tier: Tier, clock, pinned_first: bool):
        if pinned_first:
            tier.pin(name(1))
        data = put(tier, 1, 100)
        tier.expire(name(1), clock() + self.tick)
        if not pinned_first:
            tier.pin(name(1))
        clock.advance(2 * self.tick)
        assert tier.may_hold(name(1))
        assert got(tier, 1) == data
        put(tier, 2, 100)
        assert got(tier, 1) == data
        tier.unpin(name(1))
        self.assert_absent(tier, 1)


class LocalContract(CountsItsBytes, ListsItsObjects, HeedsPins):
    """Of tiers of this machine."""
