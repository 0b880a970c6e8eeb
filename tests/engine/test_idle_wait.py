"""The engine's process: what ends its pauses while it waits for records of other instances, and how long they
are; and calls that cross the end of a chunk of CPython's stack of frames, seen by the pages that each faults
in."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from queue import Queue

import pytest

from vllm_hypic.backends.ops import extension
from vllm_hypic.engine import idle_wait
from vllm_hypic.engine.idle_wait import IdleWait

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long pause that nothing ends would be noticed."""
    monkeypatch.setattr(idle_wait, "_LONGEST_WOKEN_S", LONG_S)


def watched() -> tuple[Queue[int], IdleWait, list[Callable[[], None]]]:
    inbox, wakes = Queue[int](), list[Callable[[], None]]()

    def watch(wake: Callable[[], None]) -> bool:
        wakes.append(wake)
        return True

    return inbox, IdleWait(inbox, watch), wakes


def pause_s(of: IdleWait, meanwhile: Callable[[], object] = lambda: None) -> float:
    timer = threading.Timer(0.05, meanwhile)
    timer.start()
    began = time.monotonic()
    of.wait(until_woken=True)
    seconds = time.monotonic() - began
    timer.join()
    return seconds


def test_an_arriving_request_ends_a_pause_and_stays_in_the_inbox() -> None:
    inbox, of, _ = watched()
    assert pause_s(of, lambda: inbox.put(7)) < LONG_S / 2
    assert pause_s(of) < LONG_S / 2, "it is still there: no pause"
    assert inbox.get_nowait() == 7


def test_an_arriving_record_ends_a_pause_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, of, wakes = watched()
    assert pause_s(of, lambda: wakes[0]()) < LONG_S / 2
    assert inbox.empty() and len(wakes) == 1
    wakes[0]()
    assert pause_s(of) < LONG_S / 2, "it came before the pause: there is none"
    monkeypatch.setattr(idle_wait, "_LONGEST_WOKEN_S", 0.2)
    assert pause_s(of) >= 0.2, "and that was it"


def test_waking_disturbs_nobody_who_waits_for_the_inbox() -> None:
    (inbox, of, _), got = watched(), list[int]()
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    time.sleep(0.05)
    of.wake()
    inbox.put(1)
    reader.join(LONG_S)
    assert got == [1]


@pytest.mark.parametrize("of", [IdleWait(), IdleWait(Queue())], ids=["no inbox", "records come elsewhere"])
def test_where_nothing_tells_of_records_pauses_are_short(of: IdleWait) -> None:
    assert pause_s(of) < LONG_S / 2


def test_short_pauses_grow_with_the_time_waited_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    times, slept = iter([100.0, 100.5, 200.0, 300.0]), list[float]()
    monkeypatch.setattr(idle_wait.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(idle_wait.time, "sleep", slept.append)
    of = IdleWait()
    for _ in range(3):
        of.wait(until_woken=True)
    of.reset()
    of.wait(until_woken=True)
    assert slept == pytest.approx([0.001, 0.01, 0.02, 0.001])


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
