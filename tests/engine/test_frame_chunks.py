"""Calls that cross the end of a chunk of CPython's stack of frames, seen by the pages that each faults in."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from vllm_hypic.backends.ops import extension

# In a process of its own: pytest's may keep chunks already.
MEASURE = textwrap.dedent(
    """
    import resource
    from concurrent.futures import ThreadPoolExecutor
    from vllm_hypic.backends.ops import extension

    CALLS = 200

    def leaf():
        return None

    # Larger than the frames of those who call it: some depth leaves room for those, and none for this.
    leaf.__code__ = leaf.__code__.replace(co_stacksize=64)

    def most_faults(depth):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(CALLS):
            leaf()
        here = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        return here if depth == 0 else max(here, most_faults(depth - 1))

    # Some depth of 400 is at the end of a chunk of 16 KB, wherever the module's own frame ends.
    print(most_faults(400))
    for _ in range(2):
        extension.kernels().keep_frame_chunks()
    print(most_faults(400))
    # More chunks at once than are kept, taken and given back by threads that end.
    with ThreadPoolExecutor(64) as pool:
        print(len(list(pool.map(most_faults, [600] * 64))))
    print(most_faults(400))
    """
)


@pytest.mark.skipif(bool(extension.missing()), reason="the C++ kernels are not built")
def test_chunks_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    without, kept, threads, after = done.stdout.split()
    assert int(without) >= 200
    assert int(kept) < 100 and int(after) < 100
    assert threads == "64"
