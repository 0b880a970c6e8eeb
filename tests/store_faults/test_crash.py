"""``kill -9`` in the middle of a write, and a new server on what is left on disk."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from examples.demo.single import Task
from vllm_hypic.harness.serving import Server

from .asking import BOUND_S, DOCUMENTS, Questions, ask
from .conftest import small_server
from .observing import FILE_HEAD, check_record, files_of, partials_of, settled

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

    with small_server(tmp_path / "second.log", ROOM, disk) as server:
        assert not partials_of(folder), "leftovers of the dead writer"
        # Waiting for each answer: a batch of other requests could change its last bits.
        assert [ask(server, task) for task in before] == list(before.values())
        assert [ask(server, task) for task in unanswered] == [task.answer for task in unanswered]
        found = settled(server)["disk"]
        counts = server.metrics()
    assert found["hits"] == counts["vllm:hypic_segments_loaded_total"] == len(committed)
    assert found["corrupt"] == found["errors"] == 0, found
    new = files_of(folder).keys() - committed.keys()
    assert counts["vllm:hypic_segments_computed_total"] == found["misses"] == len(new), (
        "only what was missing"
    )
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
    deadline = time.monotonic() + BOUND_S
    while True:
        while not partials_of(folder):
            assert time.monotonic() < deadline, "nothing is written"
            time.sleep(0.0005)
        send(pids, signal.SIGSTOP)
        while not all(map(stopped, pids)):
            assert time.monotonic() < deadline, "not stopped"
            time.sleep(0.001)
        if partials_of(folder):
            return
        send(pids, signal.SIGCONT)


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def stopped(pid: int) -> bool:
    """Every thread of it: one in a system call, such as fsync, stops after that."""
    states = [Path(f"/proc/{pid}/task/{t.id}/stat").read_text() for t in psutil.Process(pid).threads()]
    return all(state.rpartition(")")[2].split()[0] in "tT" for state in states)
