"""Replicas of one server: one answer of several, and registries that have the same ids."""

from pathlib import Path

from vllm_hypic.cache_api.answers import CacheStats, Place, Segment, SegmentPage
from vllm_hypic.cache_api.commands import Failure
from vllm_hypic.cache_api.registry import SegmentRegistry
from vllm_hypic.cache_api.replicas import joined

NAMESPACE = "ab" * 32


def segment(id: str = "one", *, resident: bool = True, stored: bool = False) -> Segment:
    what = {"id": id, "role": "interior", "place": Place.INTERIOR, "tokens": 4, "key": "k" * 64}
    when = {"created": 1.0, "last_used": 1.0, "expires": None}
    where = {"bytes": 100 if resident else 0, "resident": resident, "stored": stored}
    return Segment(**what, **when, **where, pinned=False)


def test_a_segment_is_resident_where_every_replica_has_it() -> None:
    both = joined(segment(), [segment(stored=True)])
    assert isinstance(both, Segment) and both.resident and both.stored and both.bytes == 200
    one = joined(segment(), [segment(resident=False)])
    assert isinstance(one, Segment) and not one.resident and one.bytes == 100
    behind = joined(segment(), [Failure(404, "unknown")])
    assert isinstance(behind, Segment) and not behind.resident
    refused = Failure(409, "cannot be pinned", "one")
    assert joined(segment(), [segment(), refused]) == refused


def test_pages_are_those_of_the_first() -> None:
    first = SegmentPage([segment("a"), segment("b")], "b")
    other = SegmentPage([segment("b"), segment("c")], None)
    page = joined(first, [other])
    assert isinstance(page, SegmentPage) and page.next == "b"
    assert [(s.id, s.resident) for s in page.segments] == [("a", False), ("b", True)]


def test_numbers_add_up_but_for_a_tier_that_is_down() -> None:
    def stats(up: float) -> CacheStats:
        return CacheStats({"disk": {"hits": 2.0, "up": up}}, 3, "file")

    found = joined(stats(1.0), [stats(0.0)])
    assert isinstance(found, CacheStats) and found.segments == 3
    assert found.tiers == {"disk": {"hits": 4.0, "up": 0.0}}


def test_a_registry_takes_the_id_that_the_first_replica_gave() -> None:
    registry = SegmentRegistry(None, NAMESPACE)
    own = registry.add("owner", Place.INTERIOR, [1, 2, 3])
    given = registry.add("owner", Place.INTERIOR, [1, 2, 3], segment_id="given")
    assert given.id == "given" and registry.get("owner", own.id) is None and len(registry) == 1
    assert registry.add("owner", Place.INTERIOR, [1, 2, 3]).id == "given"
    assert registry.add("owner", Place.INTERIOR, [4], segment_id="new").id == "new"


def test_every_replica_gets_its_own_file_again(tmp_path: Path) -> None:
    registries = [SegmentRegistry(tmp_path, NAMESPACE, replica=n) for n in (1, 0)]
    paths = [registry.path for registry in registries]
    for registry in registries:
        registry.close()
    again = [SegmentRegistry(tmp_path, NAMESPACE, replica=n) for n in (0, 1, 2)]
    assert [registry.path for registry in again[:2]] == paths[::-1]
    for registry in again:
        registry.close()
