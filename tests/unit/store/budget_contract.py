"""What a tier must do that keeps a budget."""

import random

import pytest

from vllm_hypic.store.tiers.base import Tier, TierFull

from .tier_contract import content, got, in_threads, name, put


class BudgetContract:
    """For tiers that keep a byte budget themselves, least recently used first.

    Fixture of the subclass: ``small``, open and empty, with a budget of :attr:`BUDGET` bytes.
    """

    BUDGET = 1000

    @pytest.fixture(autouse=True)
    def _audit_small(self, small):
        yield
        small.check_integrity()

    @pytest.fixture
    def full(self, small: Tier) -> Tier:
        """Has four objects, which take the whole budget."""
        for i in range(4):
            put(small, i, 250)
        return small

    @staticmethod
    def held(tier: Tier) -> list[int]:
        return [i for i in range(20) if tier.may_hold(name(i))]

    def test_budget_is_never_exceeded(self, small: Tier):
        assert small.used() == (0, self.BUDGET)
        for i in range(20):
            data = put(small, i, 130 + 10 * i)
            used, budget = small.used()
            assert budget == self.BUDGET and used <= budget
            assert got(small, i) == data

    @pytest.mark.parametrize("use", ["get", "touch"])
    def test_least_recently_used_leaves_first(self, full: Tier, use: str):
        if use == "get":
            assert got(full, 0) is not None
        else:
            full.touch(name(0))
            full.touch(name(9))
        put(full, 4, 250)
        assert self.held(full) == [0, 2, 3, 4]
        put(full, 5, 500)
        assert self.held(full) == [0, 4, 5]

    def test_budget_is_used_up_and_may_hold_and_held_are_no_use(self, full: Tier):
        assert self.held(full) == [0, 1, 2, 3] and full.used()[0] == self.BUDGET
        list(full.held() or ())
        put(full, 4, 250)
        assert self.held(full) == [1, 2, 3, 4]

    def test_larger_than_the_budget_is_refused(self, small: Tier):
        kept = put(small, 1, 500)
        with pytest.raises(TierFull, match="1001"):
            put(small, 2, self.BUDGET + 1)
        assert self.held(small) == [1]
        assert got(small, 1) == kept
        put(small, 3, self.BUDGET)
        assert self.held(small) == [3]

    @pytest.mark.parametrize("pinned_first", [False, True])
    def test_pinned_objects_stay(self, small: Tier, pinned_first: bool):
        if pinned_first:
            small.pin(name(0))
        data = put(small, 0, 400)
        if not pinned_first:
            small.pin(name(0))
        for i in range(1, 6):
            put(small, i, 400)
            assert got(small, 0) == data
        with pytest.raises(TierFull, match="pinned"):
            put(small, 6, 601)
        assert self.held(small) == [0, 5], "what is refused evicts nothing"
        assert got(small, 0) == data
        small.unpin(name(0))
        put(small, 6, 601)
        assert not small.may_hold(name(0))

    def test_a_pinned_object_can_be_deleted_and_cleared(self, small: Tier):
        put(small, 0, 400)
        small.pin(name(0))
        assert small.delete(name(0)) is True
        put(small, 0, 400)
        small.clear()
        assert self.held(small) == [] and small.used()[0] == 0

    def test_expired_objects_leave_before_others(self, full: Tier, clock):
        full.expire(name(3), clock() + 1)
        clock.advance(2)
        put(full, 4, 250)
        assert self.held(full) == [0, 1, 2, 4]

    def test_expiry_set_before_the_object_comes(self, small: Tier, clock):
        small.expire(name(0), clock() + 1)
        assert put(small, 0, 250) == got(small, 0)
        clock.advance(2)
        assert not small.may_hold(name(0)) and got(small, 0) is None

    def test_threads_in_a_tight_budget(self, small: Tier):
        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                i = rng.randrange(20)
                try:
                    put(small, i, 100 + i)
                except TierFull:
                    continue
                assert small.used()[0] <= self.BUDGET
                assert got(small, i, 200) in (None, content(i, 100 + i))

        in_threads(work)
        held = self.held(small)
        assert small.used()[0] == sum(100 + i for i in held)
        assert all(got(small, i) == content(i, 100 + i) for i in held)
