"""SIGTERM ends a program or a server with all of its processes, whatever the engine does at that time."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from faults.faulty import SlowWay

from benchmarks.lib import serving
from benchmarks.lib.processes import free_port
from benchmarks.lib.serving import Server
from benchmarks.services import RedisServer
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.builder import build_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

START_S, ENDS_S = 300.0, 10.0
SLOWLY_S = 30.0
"""Where an engine may write for twice ``close_s``; and where a front end, on a machine with other work, gives
back all that it imported."""
LOADS, LINKED = "Starting to load model", "; pool of "
"""What an engine logs before it loads weights, and before it warms up."""
SERVES, TWO = "Application startup complete", ("--api-server-count", "2")
MODEL, PROGRAM = EXAMPLE / "model", Path(__file__).with_name("offline_program.py")
ENGINE: dict[str, Any] = {"enforce_eager": True, "max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20}
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


class Started:
    """A process in a session of its own, started as tests start servers."""

    def __init__(self, log: Path, command: list[str]) -> None:
        self.log = log
        log.touch()
        self._process = serving.launch([sys.executable, *command], log, env={**os.environ, **ENV})

    def wait_for(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not met():
            assert self._process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.log.read_text(errors="replace"))

    def ends_at(self, text: str, within_s: float = ENDS_S) -> None:
        self.wait_for_text(text)
        self.ends(within_s)

    def ends(self, within_s: float = ENDS_S) -> None:
        self._process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        while left := self.left():
            assert time.monotonic() < told + within_s, f"{left} live on:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)
            self._process.poll()

    def left(self) -> list[psutil.Process]:
        """Processes of the session that live."""
        return serving._session(self._process.pid)

    def kill(self) -> None:
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def hypic(**options: Any) -> dict[str, Any]:
    return {"attention_backend": "hypic", "additional_config": {"hypic": {"pool_bytes": 32 << 20, **options}}}


def tier(way: SlowWay) -> dict[str, Any]:
    url = f"redis://127.0.0.1:{way.port}/0"
    return {"tiers": [{"type": "redis", "url": url}], "close_s": 1.0, "deadline_s": 60.0}


def listening() -> dict[str, str]:
    """Addresses of an instance of segment parallelism."""
    return {name: f"tcp://127.0.0.1:{free_port()}" for name in ("listen", "events")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Started]]:
    with ExitStack() as started:

        def begin(command: list[str]) -> Started:
            found = Started(tmp_path / "log", command)
            started.callback(found.kill)
            return found

        yield begin


@pytest.fixture
def program(start: Callable[[list[str]], Started]) -> Callable[..., Started]:
    def begin(length: int = 0, ranks: int = 1, **options: Any) -> Started:
        engine = {**ENGINE, "tensor_parallel_size": ranks, **hypic(**options)}
        return start([str(PROGRAM), str(MODEL), json.dumps(engine), str(length)])

    return begin


@pytest.fixture
def server(start: Callable[[list[str]], Started], tmp_path: Path) -> Callable[..., tuple[Started, Server]]:
    def begin(*more: str, **options: Any) -> tuple[Started, Server]:
        config = json.dumps(hypic(**options)["additional_config"])
        found = Server(
            MODEL,
            *("--attention-backend", "hypic", "--additional-config", config),
            *("--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", "64M"),
            *("--chat-template", str(EXAMPLE / "chat_template.jinja"), *more),
        )
        return start([*found.program, *found.command[1:]]), found

    return begin


@pytest.fixture
def way(tmp_path: Path) -> Iterator[SlowWay]:
    """To a Redis server."""
    with RedisServer(tmp_path) as redis, SlowWay(redis.port) as found:
        yield found


IMPORTS, HAS_ENGINE, ANSWERS = "[program] imports", "has an engine", "has an answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "length"),
    [(HAS_ENGINE, 0), (IMPORTS, 4000), (LOADS, 4000), (LINKED, 4000), (ANSWERS, 4000)],
)
def test_a_program_at_any_time_as_users_start_it(program, as_users_start, text, length):
    """Its processes import everything once more, before they can know of anything."""
    program(length).ends_at(text)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["APIServer pid=", LOADS, LINKED, SERVES])
def test_a_server_at_any_time_as_users_start_it(server, as_users_start, text):
    server()[0].ends_at(text, SLOWLY_S)


@pytest.mark.fast("loads", "prefills")
@pytest.mark.parametrize(
    ("text", "ranks", "length"),
    [(LOADS, 1, 0), (LINKED, 1, 0), (LOADS, 2, 0), (LINKED, 2, 0), (ANSWERS, 1, 4000), (ANSWERS, 2, 4000)],
    ids=["loads", "warms up", "two ranks load", "two ranks warm up", "prefills", "two ranks prefill"],
)
def test_a_program_while_its_engine(program, text, ranks, length):
    program(length, ranks=ranks).ends_at(text)


def test_a_program_with_threads_of_segment_parallelism_and_a_tier_that_writes(program, way):
    started = program(1000, store=tier(way), segment_parallel=listening())
    started.wait_for_text(HAS_ENGINE)
    way.delay_s = 1.0
    started.ends_at(ANSWERS, SLOWLY_S)


@pytest.mark.fast("loads")
@pytest.mark.parametrize(
    ("text", "more"),
    [(LOADS, ()), (LINKED, ()), (SERVES, ()), (LOADS, TWO), (SERVES, TWO)],
    ids=["loads", "warms up", "idle", "two API servers load", "two API servers idle"],
)
def test_a_server_with_a_tier(server, way, text, more):
    """vLLM forgets what it is told while its engine starts.  The engine would have 12 s, and has nothing to
    write."""
    server(*more, store=tier(way))[0].ends_at(text)


def test_a_server_whose_request_waits_for_a_record(server, way):
    started, at = server(store=tier(way), segment_parallel=listening())
    started.wait_for_text(SERVES)
    way.delay_s = 60.0
    seen = threading.Event()

    def ask() -> None:
        """Again, for other records, where a look at the metrics came too late."""
        for i in range(90 * 90):
            if not seen.wait(0.05):
                segments = [f"w{i % 90} w{i // 90} w{n} " * 30 for n in (1, 2)]
                prompt = build_prompt(system="<bos> <sys> w1", segments=segments, query="w6")
                with suppress(httpx.HTTPError):
                    body = {"prompt": prompt, "max_tokens": 8}
                    httpx.post(f"{at.url}/v1/completions", json=body, timeout=60)

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    started.wait_for(lambda: at.metrics()["vllm:hypic_waiting"] > 0)
    seen.set()
    started.ends(SLOWLY_S)
    asks.join()
