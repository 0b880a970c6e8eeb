"""Which objects a tier has: told when their writes have ended, else as the tier itself says."""

import pytest

from vllm_hypic.store.protocol import LookupResult
from vllm_hypic.store.tiered import TieredStore

from .awkward_tiers import AwkwardTier, full, name, wait_for
from .conftest import ManualClock
from .stores import (
    One,
    Opener,
    Two,
    commit,
    filled,
    place,
    stuck,
)


def answer(look: LookupResult) -> LookupResult:
    wait_for(lambda: look.found is not None, "an answer")
    return look


def fault(store: TieredStore, i: int) -> str:
    look = answer(store.look_for([name(i)], "tier"))
    assert not look.found
    return look.error


def is_there(store: TieredStore, i: int, tier: str = "tier") -> bool:
    look = answer(store.look_for([name(i)], tier))
    assert not look.error
    return look.found == {name(i)}


def test_the_tier_itself_is_asked_and_gives_no_bytes(opened: Opener) -> None:
    remote = AwkwardTier(tells=False)
    store = opened(AwkwardTier("fast"), remote)
    assert not is_there(store, 1)
    place(remote, 1)  # by another engine
    assert is_there(store, 1)
    assert "get" not in remote.calls and "put" not in remote.calls
    with pytest.raises(KeyError, match=r"no tier is named 'slow': there are \['fast', 'tier'\]"):
        store.look_for([name(1)], "slow")


def test_a_write_under_way_is_waited_for(two: Two) -> None:
    store, _, slow = two
    stuck(slow, "put", lambda: commit(store, 1))
    looks = [store.look_for([name(1)], "slow") for _ in range(2)]
    assert is_there(store, 1, "fast"), "what is over in one tier does not wait for another"
    assert [look.found for look in looks] == [None, None]
    slow.release()
    assert [answer(look).found for look in looks] == [{name(1)}] * 2
    assert "first" not in slow.calls


def test_a_refused_write_is_told_with_its_reason(one: One) -> None:
    store, tier = one
    hang = stuck(tier, "put", lambda: commit(store, 1))
    commit(store, 2)
    look = store.look_for([name(2)], "tier")
    tier.before["put"] = full
    hang.release()
    assert answer(look) == LookupResult(frozenset(), "TierFull: full")
    assert not is_there(store, 2), "asked when the write is over"


def test_what_fails_or_hangs_is_told(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier)
    filled(store, 1)
    hang = tier.hang("first")
    look = store.look_for([name(1)], "tier")
    hang.wait_until_entered()
    clock.advance(6)
    assert answer(look).error == "the tier did not answer within 5 s"
    assert fault(store, 1) == "the tier is bypassed"
    tier.recover()
    clock.advance(2)
    assert is_there(store, 1), "the look is the probe"
    tier.fail("first")
    assert fault(store, 1) == "TierError: first failed"


def test_who_waits_for_others_has_a_deadline_too(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier, readers=1)
    place(tier, 1)
    slow = tier.hang("first")
    looks = [store.look_for([name(1)]) for _ in range(3)]
    slow.wait_until_entered()
    clock.advance(3)
    slower = tier.hang("first")
    slow.release()
    slower.wait_until_entered()
    clock.advance(3)
    assert answer(looks[2]).found == frozenset(), "it has waited in vain"
    assert looks[1].found is None
    slower.release()
    assert [answer(look).found for look in looks[:2]] == [{name(1)}] * 2


def test_a_deleted_object_is_not_there(opened: Opener) -> None:
    tier = AwkwardTier(tells=False)
    store = opened(tier)
    hang = stuck(tier, "put", lambda: commit(store, 1))
    look = store.look_for([name(1)], "tier")
    store.delete(name(1))
    assert answer(look).error == "the record was deleted, or could not be completed"
    hang.release()
    place(tier, 2)
    stuck(tier, "delete", lambda: store.delete(name(2)))
    assert not is_there(store, 2), "its delete is under way"


def test_a_closed_store_says_so(opened: Opener) -> None:
    store = opened(AwkwardTier())
    store.close()
    assert fault(store, 1) == "the store is closed"


@pytest.mark.parametrize("tells", [True, False])
def test_which_of_many_are_there(opened: Opener, tells: bool) -> None:
    """All, where the tier can tell; else the first."""
    tier = AwkwardTier(tells=tells)
    store = opened(tier)
    place(tier, 70, 90)
    names = [name(i) for i in range(100)]
    assert answer(store.look_for(names)).found == ({name(70), name(90)} if tells else {name(70)})
    assert "get" not in tier.calls
    assert tier.calls.count("first") == (0 if tells else 2), "many are looked for at once"


def test_a_tier_that_fails_has_none(opened: Opener) -> None:
    failing, other = AwkwardTier(tells=False), AwkwardTier("other")
    store = opened(failing, other)
    place(failing, 1)
    place(other, 2)
    failing.fail("first")
    assert answer(store.look_for([name(1), name(2)])).found == {name(2)}


def test_what_is_being_written_is_there(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    assert answer(store.look_for([name(1), name(2)])).found == {name(1)}
