"""Whether one tier has an object: told when its write has ended, else as the tier itself says."""

from __future__ import annotations

import pytest

from vllm_hypic.store.protocol import Found, Located, Presence
from vllm_hypic.store.tiered import TieredStore

from .awkward_tiers import AwkwardTier, full, name, wait_for
from .conftest import ManualClock
from .stores import Opener, commit, filled, place


def answer(store: TieredStore) -> Located:
    found: list[Located] = []
    wait_for(lambda: found.extend(store.located()) or found, "an answer")
    assert len(found) == 1
    return found[0]


def presence(store: TieredStore, i: int, tier: str = "tier") -> Presence:
    ticket = store.locate(name(i), tier)
    found = answer(store)
    assert found.ticket == ticket and bool(found.reason) == (found.presence is Presence.FAILED)
    return found.presence


def test_the_tier_itself_is_asked_and_gives_no_bytes(opened: Opener) -> None:
    remote = AwkwardTier(tells=False)
    store = opened(AwkwardTier("fast"), remote)
    assert presence(store, 1) is Presence.ABSENT
    place(remote, 1)  # by another engine
    assert presence(store, 1) is Presence.THERE
    assert "get" not in remote.calls and "put" not in remote.calls
    with pytest.raises(KeyError, match=r"no tier is named 'slow': there are \['fast', 'tier'\]"):
        store.locate(name(1), "slow")


def test_a_write_under_way_is_waited_for(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    store = opened(fast, slow)
    hang = slow.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    tickets = [store.locate(name(1), "slow") for _ in range(2)]
    assert presence(store, 1, "fast") is Presence.THERE, "what is over in one tier does not wait for another"
    assert store.located() == []
    slow.release()
    found: list[Located] = []
    wait_for(lambda: found.extend(store.located()) or len(found) == 2, "both answers")
    assert found == [Located(ticket, Presence.THERE, "") for ticket in tickets]
    assert "has" not in slow.calls


def test_a_refused_write_is_told_with_its_reason(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    commit(store, 2)
    store.locate(name(2), "tier")
    tier.before["put"] = full
    hang.release()
    assert answer(store) == Located(1, Presence.FAILED, "TierFull: full")
    assert presence(store, 2) is Presence.ABSENT, "asked when the write is over"


def test_what_fails_or_hangs_is_told(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier)
    filled(store, 1)
    hang = tier.hang("has")
    store.locate(name(1), "tier")
    hang.wait_until_entered()
    clock.advance(6)
    assert answer(store).reason == "it did not answer within 5 s"
    store.locate(name(1), "tier")
    assert answer(store).reason == "the tier is bypassed"
    tier.recover()
    clock.advance(2)
    assert presence(store, 1) is Presence.THERE, "the look is the probe"
    tier.fail("has")
    store.locate(name(1), "tier")
    assert answer(store).reason == "TierError: has failed"


def test_a_deleted_object_is_not_there(opened: Opener) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    store.locate(name(1), "tier")
    store.delete(name(1))
    assert answer(store).reason == "it was deleted, or could not be finished"
    hang.release()
    place(tier, 2)
    deleting = tier.hang("delete")
    store.delete(name(2))
    deleting.wait_until_entered()
    assert presence(store, 2) is Presence.ABSENT, "its delete is under way"


def test_a_closed_store_says_so(opened: Opener) -> None:
    store = opened(AwkwardTier())
    store.close()
    store.locate(name(1), "tier")
    assert answer(store).reason == "the store is closed"


@pytest.mark.parametrize("tells", [True, False])
def test_which_of_many_are_there(opened: Opener, tells: bool) -> None:
    """All, where the tier can tell; else the first."""
    tier = AwkwardTier(tells=tells)
    store = opened(tier)
    for i in (70, 90):
        place(tier, i)
    names = [name(i) for i in range(100)]
    ticket = store.find(names)
    found: list[Found] = []
    wait_for(lambda: found.extend(store.found()) or found, "an answer")
    assert found == [Found(ticket, (name(70), name(90)) if tells else (name(70),))]
    assert "get" not in tier.calls


def test_a_tier_that_fails_has_none(opened: Opener) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier)
    place(tier, 1)
    tier.fail("has")
    ticket = store.find([name(1)])
    found: list[Found] = []
    wait_for(lambda: found.extend(store.found()) or found, "an answer")
    assert found == [Found(ticket, ())]
