"""Questions of the demo model, and who asks them: one client, several at once, a plain one beside them."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import httpx
from store.awkward_tiers import wait_for

from benchmarks.lib.serving import Server
from examples.demo.single import Task, make_tasks
from vllm_hypic.primitives.builder import build_prompt

DOCUMENTS, DOCUMENT_TOKENS = 5, 96
BOUND_S = 60.0
"""No request takes longer.  Deadlines of tiers are seconds; the rest is for slow machines."""
_FIRST_TASK = 500
"""Tasks before are other tests'."""
_MISSED = {733, 1206, 1242, 1316, 1381}
"""Of the first thousand, those that the model gets wrong, with stock vLLM too."""
_HTTP = httpx.Client(timeout=BOUND_S, limits=httpx.Limits(keepalive_expiry=2.0))
"""A new one for each request would take longer than the request; vLLM closes a quiet connection after 5 s."""


class Questions:
    """Questions whose documents no request had before."""

    def __init__(self) -> None:
        self._numbers = (n for n in itertools.count(_FIRST_TASK) if n not in _MISSED)
        self._lock = threading.Lock()

    def new(self, count: int) -> list[Task]:
        return [self.one() for _ in range(count)]

    def one(self) -> Task:
        with self._lock:  # a generator runs in one thread at a time
            number = next(self._numbers)
        [task] = make_tasks(number, 1, DOCUMENTS, DOCUMENT_TOKENS)
        return task


def prompt_of(task: Task) -> str:
    return build_prompt(system=f"<bos> <sys> {task.system}", segments=task.documents, query=task.question)


def ask(server: Server, task: Task) -> str:
    """The answer.  Raises what httpx raises: refused, broken off, not within the bound."""
    body = {"prompt": prompt_of(task), "max_tokens": 8, "temperature": 0}
    [choice] = _HTTP.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()["choices"]
    return choice["text"].strip()


def ask_right(server: Server, *tasks: Task) -> None:
    """One after the other; each answer is the right one."""
    assert [ask(server, task) for task in tasks] == [task.answer for task in tasks]


def nudge(server: Server) -> None:
    """A few steps of the engine: it reports what the store counted in steps only."""
    body = {"prompt": "w1 w2 w3", "max_tokens": 3, "ignore_eos": True}
    _HTTP.post(f"{server.url}/v1/completions", json=body).raise_for_status()


@dataclass
class Clients:
    """Threads that ask what ``choose(thread)`` gives, until they are left; then every answer is checked."""

    server: Server
    choose: Callable[[int], Task]
    threads: int
    answered: int = 0
    wrong: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(self.threads)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * BOUND_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
            assert not self.wrong, f"{len(self.wrong)} of {self.answered + len(self.wrong)}: {self.wrong[:5]}"

    def _ask_on(self, thread: int) -> None:
        while not self._over.is_set():
            task = self.choose(thread)
            try:
                said = ask(self.server, task)
            except (httpx.HTTPError, ValueError) as e:
                said = f"{type(e).__name__}: {e}"
            with self._lock:
                if said == task.answer:
                    self.answered += 1
                else:
                    self.wrong.append(f"{task.question}: {said!r}, expected {task.answer!r}")

    def wait_for(self, more: int) -> None:
        """Until ``more`` requests were answered, or one wrongly."""
        until = self.answered + more
        wait_for(lambda: self.answered >= until or self.wrong, f"{more} answers", BOUND_S)


class PlainStream:
    """Plain requests (no separators), streamed one after the other until left; when each token came.

    A virtual machine may stand still for seconds: that is nobody's doing here, so the time in which a thread
    that only sleeps was not woken does not count as a gap.
    """

    _TICK_S = 0.01

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._times: list[float] = []
        self._standstills: list[tuple[float, float]] = []
        self._woken = 0.0
        """When the ticker ran last: of standstills it knows up to then."""
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._stream_on, name="plain client")
        self._ticker = threading.Thread(target=self._tick, name="ticker")

    def __enter__(self) -> Self:
        self._ticker.start()
        self._thread.start()
        wait_for(lambda: len(self._times) >= 10 or self._fault, "plain answers", BOUND_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._over.set()
        self._thread.join(BOUND_S)
        self._ticker.join(BOUND_S)
        if kind is None:
            assert not self._thread.is_alive(), "a plain request hangs"
            if self._fault is not None:
                raise self._fault

    def _tick(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + self._TICK_S
            time.sleep(self._TICK_S)
            woken = time.monotonic()
            if woken - due > self._TICK_S:
                self._standstills.append((due, woken))
            self._woken = woken

    def _stream_on(self) -> None:
        try:
            while not self._over.is_set():
                for at in self._one_answer():
                    self._times.append(at)
                    if self._over.is_set():
                        break
        except Exception as e:
            self._fault = e

    def _one_answer(self) -> Iterator[float]:
        body = {"prompt": "w1 w2 w3", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        url = f"{self._server.url}/v1/completions"
        with _HTTP.stream("POST", url, json=body) as response:
            response.raise_for_status()
            last = ""
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    assert '"error"' not in line, line
                    yield time.monotonic()
                last = line or last
        assert last == "data: [DONE]", f"the answer ends with {last!r}"

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens, and between ``start`` or ``end`` and the nearest token."""
        while self._woken < end:  # after a standstill its own caller may be woken first
            time.sleep(self._TICK_S)
        times = [start, *(t for t in list(self._times) if start < t < end), end]
        still = list(self._standstills)
        return [b - a - _overlap(still, a, b) for a, b in itertools.pairwise(times)]


def _overlap(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in spans)
