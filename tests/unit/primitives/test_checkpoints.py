"""Where records have checkpoints, and what their keys tell apart."""

import dataclasses
import time
from itertools import combinations
from typing import Any

import pytest

from vllm_hypic.primitives.checkpoints import LEAST_TOKENS, boundaries, may_have_checkpoints
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.primitives.media import Medium
from vllm_hypic.primitives.plan import CachedSegment, PromptPlan
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.prefix import build_prefix_plan

from .test_plan import PAD, ROOM, SEP, SPACE, plan_of, run

EVERY = 32
DOCUMENT = run(100, 150)
METHOD = parse_link("hypic", 2, "none", "none")
KNOWN = "f36f0966c53ce8744bd6a6bb91aa5600cdaf513c6d8e0f09469cb5abd31326df"
"""Key of its record, as interior segment, of engines that know no checkpoints."""


def plan(tokens: list[int], *, every: int = EVERY, **changed: Any) -> PromptPlan:
    limits = dataclasses.replace(ROOM, max_request_tokens=1 << 30, pages=1 << 30)
    return plan_of(tokens, limits=limits, checkpoint_tokens=every, **changed)


def interior(document: list[int], **changed: Any) -> CachedSegment:
    return plan([*run(900, 9), SEP, *document, SEP, 7], **changed).segments[1]


def leading(document: list[int], **changed: Any) -> CachedSegment:
    return plan([*document, SEP, *run(900, 9), SEP, 7], **changed).segments[0]


def keys(segment: CachedSegment) -> list[SegmentKey]:
    return [checkpoint.key for checkpoint in segment.checkpoints]


def stops(segment: CachedSegment) -> list[int]:
    return [checkpoint.stop for checkpoint in segment.checkpoints]


@pytest.mark.parametrize("head", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 47, 48, 49, 63, 64, 65, 150])
def test_boundaries(head: int, length: int) -> None:
    stop = head + length
    found = boundaries(head, stop, EVERY)
    assert found == [at for at in range(head + EVERY, stop, EVERY) if stop - at >= LEAST_TOKENS]
    assert boundaries(head, stop, 0) == []
    if found:
        assert may_have_checkpoints(stop, EVERY)
    assert not may_have_checkpoints(stop, 0)


def test_no_boundary_is_in_an_image() -> None:
    images = (Medium(30, 33, "a"), Medium(64, 70, "b"), Medium(90, 96, "c"))
    assert boundaries(0, 200, EVERY, images) == [64, 96, 128, 160]


def test_segments_with_and_without_seams() -> None:
    assert stops(leading(DOCUMENT)) == [32, 64, 96, 128]
    assert stops(interior(DOCUMENT)) == [34, 66, 98, 130]
    assert stops(interior(DOCUMENT, seam=0)) == [32, 64, 96, 128]
    assert interior(DOCUMENT).has_scratch_slot and not leading(DOCUMENT).has_scratch_slot
    assert not interior(DOCUMENT[:40]).has_scratch_slot


@pytest.mark.parametrize("reads_successors", [False, True])
@pytest.mark.parametrize("make", [interior, leading])
def test_equal_beginnings_have_equal_keys_until_they_part(make: Any, reads_successors: bool) -> None:
    """With a head that drafts: until the token behind a checkpoint, which it has read, is another."""
    read = {"reads_successors": reads_successors}
    wanted = keys(make(DOCUMENT, **read))
    assert len({*wanted, make(DOCUMENT, **read).key}) == len(wanted) + 1
    assert keys(make([*DOCUMENT, *run(300, 80)], **read))[: len(wanted)] == wanted
    assert reads_successors is not bool(set(wanted) & set(keys(make(DOCUMENT))))
    for edited in range(len(DOCUMENT)):
        found = make([*DOCUMENT[:edited], 77, *DOCUMENT[edited + 1 :]], **read)
        same = [k == w for k, w in zip(keys(found), wanted, strict=True)]
        assert same == [stop + reads_successors <= edited for stop in stops(found)]


OTHERS: dict[str, dict[str, Any]] = {
    "text": {"context": "text"},
    "lead": {"context": "lead"},
    "anchor": {"link": "seam-2-2+4"},
    "dummies": {"link": "epic-0"},
    "place": {"link": "prompt-cache"},
    "head": {"seam": 0},
    "salt": {"namespace": SPACE.scoped(salt="a", lora=None)},
    "another salt": {"namespace": SPACE.scoped(salt="b", lora=None)},
    "adapter": {"namespace": SPACE.scoped(salt=None, lora="a")},
    "weights": {"namespace": dataclasses.replace(SPACE, generation="1")},
    "model": {"namespace": Namespace.from_config({"model": "other"})},
    "every": {"every": 2 * EVERY},
}


def test_what_is_computed_otherwise_has_other_keys() -> None:
    found = {name: set(keys(interior(DOCUMENT, **other))) for name, other in OTHERS.items()}
    found |= {"as it is": set(keys(interior(DOCUMENT))), "leading": set(keys(leading(DOCUMENT)))}
    assert all(found.values())
    for (one, ours), (other, theirs) in combinations(found.items(), 2):
        assert not ours & theirs, (one, other)


def test_a_tail_is_not_part_of_what_is_before() -> None:
    """Methods that differ behind a checkpoint alone share it."""
    assert keys(interior(DOCUMENT, link="seam-2-2")) == keys(interior(DOCUMENT, link="seam-2-0"))


def test_another_anchor_has_other_keys() -> None:
    def anchored(lead: list[int]) -> list[SegmentKey]:
        return keys(plan([*lead, SEP, *DOCUMENT, SEP, 7], link="seam-2-2+4").segments[1])

    assert anchored(run(900, 9)) == anchored([*run(900, 8), 3])
    assert not set(anchored(run(900, 9))) & set(anchored(run(901, 9)))


def test_padding_moves_what_is_behind_it() -> None:
    one = interior([*DOCUMENT[:40], PAD, PAD, *DOCUMENT[40:]])
    other = interior([*DOCUMENT[:50], PAD, PAD, *DOCUMENT[50:]])
    assert stops(one) == stops(other) == [34, 66, 98, 130]
    assert [a == b for a, b in zip(keys(one), keys(other), strict=True)] == [True, False, False, False]
    assert not set(keys(one)) & set(keys(interior(DOCUMENT)))


def test_without_checkpoints_keys_are_as_ever() -> None:
    """Of whole engines, and of segments that are too short for one."""
    assert interior(DOCUMENT, every=0).key == KNOWN
    assert keys(interior(DOCUMENT, every=0)) == []
    short = DOCUMENT[: EVERY + LEAST_TOKENS - 1]
    assert interior(short, seam=0).key == interior(short, every=0, seam=0).key
    assert interior(DOCUMENT).key != KNOWN


def test_long_segments_are_planned_soon() -> None:
    """Keys are chained: as long as one of the segment, many times over what it takes."""
    document = run(2000, 500_000)
    start = time.process_time()
    found = interior(document, every=64)
    assert len(found.checkpoints) > 7000 and time.process_time() - start < 5.0


def test_a_page_of_a_prefix_tells_the_token_behind_it() -> None:
    def pages(tokens: list[int], reads_successors: bool) -> list[SegmentKey]:
        options = {"least_tokens": 1, "reads_successors": reads_successors}
        plan = build_prefix_plan(tokens, METHOD, SPACE, dataclasses.replace(ROOM, page_tokens=16), **options)
        assert plan is not None
        [segment] = plan.segments
        return [*keys(segment), segment.key]

    one, other = run(0, 49), [*run(0, 48), 77]
    assert len(pages(one, True)) == 3 and pages(one, False) == pages(other, False)
    assert [a == b for a, b in zip(pages(one, True), pages(other, True), strict=True)] == [True, True, False]
    assert not set(pages(one, True)) & set(pages(one, False))
