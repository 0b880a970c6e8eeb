"""Calls that cross the end of a chunk of CPython's stack of frames, seen by the pages that each faults in."""

from __future__ import annotations

import resource

from vllm_hypic.engine.frame_room import with_room

CALLS = 200


def leaf() -> None:
    return None


# Larger than the frames of those who call it: some depth leaves room for those, and none for this.
leaf.__code__ = leaf.__code__.replace(co_stacksize=64)


def most_faults(depth: int) -> int:
    """Page faults of ``CALLS`` calls, at the depth of up to ``depth`` frames where there are most."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        leaf()
    here = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return here if depth == 0 else max(here, most_faults(depth - 1))


def test_calls_stay_in_one_chunk() -> None:
    """Some depth of 400 is at the end of a chunk of 16 KB, wherever pytest's own frames end."""
    assert most_faults(400) >= CALLS
    assert with_room(most_faults)(400) < CALLS / 2
