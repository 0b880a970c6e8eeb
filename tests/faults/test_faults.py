"""A tier that fails, hangs or is slow costs records, never a request, and never a plain request's time; nor
does ``kill -9`` in the middle of a write."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import httpx
import psutil
import pytest
from redis import Redis
from store.awkward_tiers import wait_for

from benchmarks.lib.serving import Server
from benchmarks.services import RedisServer, Service
from examples.demo.single import Task

from .asking import BOUND_S, DOCUMENTS, Clients, PlainStream, Questions, ask, ask_right
from .conftest import DEADLINE_S, ENV, TRIES, Stand, small_server
from .faulty import SlowWay
from .observing import FILE_HEAD, TierCounts, check_record, files_of, partials_of, settled, tiers, tiers_when


def test_a_full_disk_refuses_records_and_takes_them_again(stand: Stand) -> None:
    disk = stand.disk
    stand.push_out()
    before = settled(stand.server)["disk"]
    # Seldom one is refused all the same: a file that was removed while it is read takes its room with it.
    assert before["evictions"] > before["refused"], "what fits is kept instead of what is older"
    # All room is another's: the tier's own files are gone, so it has none to give away.
    for file in files_of(stand.records).values():
        file.unlink()
    disk.fill()
    try:
        stand.push_out()
        refused = before["refused"]
        full = tiers_when(stand.server, lambda t: t["disk"]["refused"] > refused, "it refuses")["disk"]
        assert full["up"] and full["errors"] == before["errors"], "a full disk is no failing one"
    finally:
        disk.relieve()
    stand.recover("disk")


@pytest.mark.slow
def test_a_disk_made_read_only_is_still_read(stand: Stand) -> None:
    disk = stand.disk
    old, before = stand.kept("disk")
    disk.set_writable(False)
    try:
        stand.push_out()  # of the pool; the disk cannot change
        down = tiers_when(stand.server, lambda t: not t["disk"]["up"], "the disk is down")
        found = stand.read_back(old, "disk", before)
        assert found["disk"]["stored"] == down["disk"]["stored"] == before["disk"]["stored"]
    finally:
        disk.set_writable(True)
    stand.recover("disk")


Spoilt = Callable[[Stand], AbstractContextManager[None]]


def faults_of(found: TierCounts) -> float:
    """Of Redis: either its client's patience ends first or the store's."""
    return found["redis"]["timeouts"] + found["redis"]["errors"]


@contextmanager
def hanging(stand: Stand) -> Iterator[None]:
    stand.redis.pause()
    try:
        yield
    finally:
        stand.redis.resume()


def slow(stand: Stand) -> AbstractContextManager[None]:
    return patch.object(stand.way, "delay_s", 2 * DEADLINE_S)


@dataclass(frozen=True)
class Felt:
    """Of a request whose records are in a tier that keeps it waiting, and of a plain request beside it."""

    waited_s: float
    faults: float
    gaps: list[float]
    """Seconds between tokens."""
    quiet: list[float]
    """When nothing was wrong."""

    def others_go_on(self) -> bool:
        """Whether the plain request gets tokens.  An engine that waits for a tier gives no token for half of
        the deadline, which two tiers share."""
        longest = max(DEADLINE_S / 4, 3 * max(self.quiet))
        return max(self.gaps) < longest and median(self.gaps) < max(DEADLINE_S / 20, 3 * median(self.quiet))


def keep_one_waiting(stand: Stand, spoilt: Spoilt) -> Felt:
    old, _ = stand.kept("redis", "lmcache")
    stand.push_out()
    before = settled(stand.server)
    with PlainStream(stand.server) as plain:
        began = time.monotonic()
        ask_right(stand.server, *stand.questions.new(2))
        quiet = plain.gaps(began, time.monotonic())
        with spoilt(stand):
            started = time.monotonic()
            ask_right(stand.server, old)
            ended = time.monotonic()
            gaps = plain.gaps(started, ended)
            ask_right(stand.server, *stand.questions.new(2))
            down = tiers_when(stand.server, lambda t: not t["redis"]["up"], "Redis is down")
            stand.read_back(old, "lmcache", before)
    stand.recover("redis")
    return Felt(ended - started, faults_of(down) - faults_of(before), gaps, quiet)


@pytest.mark.parametrize("spoilt", [hanging, slow], ids=["hangs", "slow"])
@pytest.mark.fast("hangs")
def test_a_tier_that_keeps_one_waiting(stand: Stand, spoilt: Spoilt) -> None:
    """Who waits for its records gets them from the next tier or computed; the others notice nothing."""
    for _ in range(TRIES):
        felt = keep_one_waiting(stand, spoilt)
        # On a busy machine Redis may fall out just before, or all processes wait for a core; not in each try.
        if felt.waited_s > DEADLINE_S / 2 and felt.others_go_on():
            break
    assert felt.faults > 0 and felt.waited_s > DEADLINE_S / 2
    assert felt.others_go_on(), felt


def service_of(stand: Stand, tier: str) -> Service:
    return stand.redis if tier == "redis" else stand.lmcache


@pytest.mark.parametrize("tier", ["redis", "lmcache"])
@pytest.mark.fast("redis")
def test_a_server_killed_under_load(stand: Stand, tier: str) -> None:
    """Known questions read from the tier, new ones write to it."""
    known = stand.questions.new(6)
    rng = random.Random(5)

    def choose(_: int) -> Task:
        return rng.choice(known) if rng.random() < 0.7 else stand.questions.one()

    with Clients(stand.server, choose, threads=4) as clients:
        clients.wait_for(12)
        service_of(stand, tier).kill()
        clients.wait_for(12)
        tiers_when(stand.server, lambda t: not t[tier]["up"], f"{tier} is down")
        service_of(stand, tier).start()
        clients.wait_for(4)
    stand.recover(tier)
    assert tiers(stand.server)[tier]["errors"] > 0


# -- many clients, few records in memory, and servers that die again and again


@pytest.mark.slow
def test_answers_and_books_hold_while_servers_die_and_come_back(stand: Stand) -> None:
    rng = random.Random(17)
    known = stand.questions.new(16)
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    chooser = [random.Random(seed) for seed in range(8)]
    before = settled(stand.server)

    def choose(client: int) -> Task:
        rare = chooser[client].random() < 0.1
        return stand.questions.one() if rare else chooser[client].choices(known, weights)[0]

    with Clients(stand.server, choose, threads=len(chooser)) as clients:
        for name in ("redis", "lmcache", "redis"):
            service = service_of(stand, name)
            clients.wait_for(rng.randint(4, 12))
            service.kill()
            time.sleep(rng.uniform(0, 1.5))
            service.start()
            assert not clients.wrong, clients.wrong[:5]

        # How many questions that takes is left to chance; LMCache is asked for what these two have lost.
        def read(found: TierCounts) -> bool:
            return all(found[tier]["hits"] > before[tier]["hits"] for tier in ("disk", "redis"))

        tiers_when(stand.server, read, "records are read from disk and Redis")
    for tier in ("redis", "lmcache"):
        stand.recover(tier)
    settled(stand.server)
    check_books(stand)
    ask_right(stand.server, *known)


def check_books(stand: Stand) -> None:
    """Whatever lies in a tier is whole, and the server knows what it has."""
    folder = stand.records
    found = tiers_when(stand.server, lambda t: t["disk"]["objects"] == len(files_of(folder)), "files match")
    files = files_of(folder)
    assert found["disk"]["bytes_used"] == sum(f.stat().st_size - FILE_HEAD for f in files.values())
    assert not partials_of(folder)
    for path in files.values():
        check_record(path.read_bytes()[FILE_HEAD:])
    with stand.redis.client() as redis:
        names = redis.keys("hypic:*")
        assert names
        for name in names:
            check_record(redis.get(name))


# -- SIGTERM while records are on their way to a slow tier


@contextmanager
def queueing(folder: Path, close_s: float, stop_s: float) -> Iterator[tuple[Server, Redis, float]]:
    """A server whose queue holds records, each of which takes a second to be written, what Redis has, and
    how many records were computed."""
    with RedisServer(folder) as redis, SlowWay(redis.port) as way, redis.client() as client:
        # A write that takes too long on a busy machine would be given up.
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{way.port}/0?socket_timeout={BOUND_S:g}"}
        waits = {"close_s": close_s, "deadline_s": BOUND_S}
        with small_server(folder / "server.log", 100, tier, **waits) as server:
            server.stop_timeout_s = stop_s
            way.delay_s = 1.0
            ask_right(server, *Questions().new(2))
            name = "vllm:hypic_segments_computed_total"
            yield server, client, server.wait_for_metrics(lambda m: m[name] >= 2 * DOCUMENTS)[name]


@pytest.mark.fast("worker apart")
@pytest.mark.parametrize("processes", ["0", "1"], ids=["in one process", "worker apart"])
def test_what_is_queued_is_written_before_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setitem(ENV, "VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    with queueing(tmp_path, BOUND_S, 2 * BOUND_S) as (server, client, computed):
        assert len(client.keys("hypic:*")) < computed - 1, "it was too fast to show anything"
        server.stop()
        names = client.keys("hypic:*")
        assert len(names) == computed
        for name in names:
            check_record(client.get(name))


@pytest.mark.slow
def test_a_server_does_not_write_longer_than_it_may_and_says_what_is_lost(tmp_path: Path) -> None:
    with queueing(tmp_path, 1.0, BOUND_S) as (server, client, computed):
        server.stop()
        lost = re.search(r"(\d+) records \(\d+ bytes\) were not written", server.log.read_text())
        assert lost is not None, server.log_tail()
        assert int(lost[1]) >= computed - len(client.keys("hypic:*")) > 0


# -- ``kill -9`` in the middle of a write, and a new server on what is left on disk


FILLED = 10
"""Questions that are answered before the crash: 50 documents."""
ROOM = 400
"""Records that fit the pool: none is fetched or computed twice."""


def test_a_server_killed_while_writing_finds_every_committed_record_again(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    disk = {"type": "disk", "path": str(folder), "bytes": "1GiB"}
    with small_server(tmp_path / "first.log", ROOM, disk) as server:
        before, unanswered = fill_and_kill(server, folder)
    assert len(before) >= FILLED and partials_of(folder), "it was killed at another moment"
    committed = files_of(folder)
    assert len(committed) >= FILLED * DOCUMENTS
    for path in committed.values():
        check_record(path.read_bytes()[FILE_HEAD:])

    with small_server(tmp_path / "second.log", ROOM, disk, deadline_s=BOUND_S) as server:
        assert not partials_of(folder), "leftovers of the dead writer"
        # Waiting for each answer: a batch of other requests could change its last bits.
        assert [ask(server, task) for task in before] == list(before.values())
        assert [ask(server, task) for task in unanswered] == [task.answer for task in unanswered]
        found = settled(server)["disk"]
        counts = server.metrics()
    assert found["hits"] == counts["vllm:hypic_segments_loaded_total"] == len(committed)
    assert found["corrupt"] == found["errors"] == 0, found
    new = files_of(folder).keys() - committed.keys()
    assert counts["vllm:hypic_segments_computed_total"] == found["misses"] == len(new), "only the missing"
    assert not partials_of(folder)


def fill_and_kill(server: Server, folder: Path) -> tuple[dict[Task, str], list[Task]]:
    """Ask more and more questions, several at a time; kill all processes in the middle of a write.

    Returns the answers so far, which were given before any process was stopped, and the questions that got
    none.
    """
    answers: dict[Task, str] = {}
    asked: list[Task] = []
    questions, over = Questions(), threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            task = questions.one()
            asked.append(task)
            try:
                answers[task] = ask(server, task)
            except httpx.TransportError:
                assert over.is_set(), "a request failed before the crash"

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(ask_on) for _ in range(4)]
        try:
            deadline = time.monotonic() + 2 * BOUND_S
            while len(answers) < FILLED or len(files_of(folder)) < FILLED * DOCUMENTS:
                assert time.monotonic() < deadline, f"{len(answers)} answers, {len(files_of(folder))} files"
                assert not any(r.done() for r in running), running
                time.sleep(0.01)
            pids = [process.pid for process in server.processes()]
            freeze_in_a_write(pids, folder)
            over.set()
            send(pids, signal.SIGKILL)
        finally:
            over.set()
            server.stop()
        for client in running:
            client.result()
    return answers, [task for task in asked if task not in answers]


def freeze_in_a_write(pids: list[int], folder: Path) -> None:
    """Stop all processes at a moment at which a file is being written."""
    while True:
        wait_for(lambda: partials_of(folder), "a file is written", BOUND_S)
        send(pids, signal.SIGSTOP)
        wait_for(lambda: all(map(stopped, pids)), "all have stopped", BOUND_S)
        if partials_of(folder):
            return
        send(pids, signal.SIGCONT)


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def stopped(pid: int) -> bool:
    """Every thread of it: one in a system call, such as fsync, stops after that."""
    try:
        states = [Path(f"/proc/{pid}/task/{t.id}/stat").read_text() for t in psutil.Process(pid).threads()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(state.rpartition(")")[2].split()[0] in "tT" for state in states)
