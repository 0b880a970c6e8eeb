"""The memory tier keeps the contract, and copies nothing."""

import numpy as np
import pytest

from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.tiers.base import Tier, TierError
from vllm_hypic.store.tiers.memory import MemoryTier

from .budget_contract import BudgetContract
from .tier_contract import ForgetsAtRestart, LocalContract, TellsAbsence, content, name, put, value, view


def opened(budget: int, clock) -> MemoryTier:
    tier = MemoryTier("memory", budget, LruPolicy(), clock=clock)
    tier.open()
    return tier


class TestContract(ForgetsAtRestart, LocalContract, TellsAbsence):
    @pytest.fixture
    def tier(self, clock):
        tier = opened(6 << 20, clock)
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, clock):
        def reopen(tier: Tier) -> Tier:
            tier.close()
            return opened(6 << 20, clock)

        return reopen


class TestBudget(BudgetContract):
    @pytest.fixture
    def small(self, clock):
        tier = opened(self.BUDGET, clock)
        yield tier
        tier.close()


@pytest.fixture
def tier(clock):
    tier = opened(1000, clock)
    yield tier
    tier.check_integrity()
    tier.close()


def test_the_buffer_itself_becomes_the_object(tier):
    buffer = view(content(1, 100))
    tier.put(name(1), buffer, value(100))
    found = tier.get(name(1), 100)
    assert np.shares_memory(np.frombuffer(found, np.uint8), np.frombuffer(buffer, np.uint8))
    assert found.readonly


def test_size_is_that_of_the_bytes(tier):
    """Whatever the cache value says: the budget is real memory."""
    tier.put(name(1), view(content(1, 100)), value(5))
    assert tier.used() == (100, 1000)


def test_not_open_yet(clock):
    with pytest.raises(TierError, match="not open"):
        put(MemoryTier("memory", 100, LruPolicy(), clock=clock), 1, 10)


def test_open_again(tier):
    put(tier, 1, 10)
    tier.close()
    tier.open()
    assert not tier.may_hold(name(1)) and tier.used()[0] == 0
    put(tier, 1, 10)
    assert tier.may_hold(name(1))


def test_what_left_is_counted(tier, clock):
    for i in range(5):
        put(tier, i, 250)
    tier.expire(name(4), clock() + 1)
    clock.advance(1)
    tier.delete(name(3))
    assert not tier.may_hold(name(4))
    assert tier.used() == (500, 1000)
    assert (tier.counts.evicted, tier.counts.expired) == (1, 1)
