"""A real ``vllm serve`` process for demos, tests and benchmarks.

    with Server("Qwen/Qwen3.5-0.8B", "--attention-backend", "hypic") as server:
        answer = ask(server.url, "/v1/completions", {"prompt": "...", "max_tokens": 8})
        print(answer.text, answer.first_token_s, server.metrics()["vllm:hypic_tokens_reused_total"])

The module needs no vLLM in its own process, and imports neither torch nor vllm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from vllm_hypic.harness.report import cpu_info

from .processes import free_port, launch


def fast_dtype() -> str:
    """Return the value of ``--dtype`` for a dense model in bfloat16.

    Where a CPU has no instructions for bfloat16, matrix products in bfloat16 take eight times as long as in
    ``float32``.  vLLM's gated delta nets on CPUs take bfloat16 alone.
    """
    fast = {"avx512_bf16", "bf16"}.intersection(cpu_info()["isa"]) or Path("/dev/nvidiactl").exists()
    return "auto" if fast else "float32"


class ServerError(RuntimeError):
    """The server did not start, or left a process behind; the message says more, such as the log's end."""


class Server:
    """A ``vllm serve MODEL OPTIONS...`` process on a free port of 127.0.0.1, as a context manager.

    Entering waits until :attr:`health` answers.  Leaving in any way ends every process of the server's
    session, and raises :class:`ServerError` if a process survives.  The server also ends with the thread that
    started the server, so that this thread must stay.
    """

    def __init__(
        self,
        model: str | Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 15.0,
    ) -> None:
        self.model, self.options = str(model), options
        self.port = free_port()
        self.log = log or Path(tempfile.gettempdir()) / f"vllm-serve-{os.getpid()}-{self.port}.log"
        self.start_timeout_s, self.stop_timeout_s = start_timeout_s, stop_timeout_s
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    health = "/health"
    """Route that answers 200 once the server is up."""
    program = ("-m", "vllm.entrypoints.cli.main")
    """Python arguments that stand for the first word of :attr:`command`."""

    @property
    def command(self) -> list[str]:
        """Return the command as a user would type it."""
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        return ["vllm", "serve", self.model, *self.options, *where]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait for :attr:`health`; raise :class:`ServerError` if the process ends or time is up."""
        if self._process is not None:
            raise ServerError("the server is already started")
        self.log.write_bytes(b"")
        self._process = launch([sys.executable, *self.program, *self.command[1:]], self.log, env=self._env)
        try:
            self._wait_for_health()
        except BaseException:
            self.stop()
            raise

    def _wait_for_health(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server ended with exit code {code} while starting; {self._told()}")
            try:
                if httpx.get(self.url + self.health, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not up after {self.start_timeout_s:g} s; {self._told()}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server; a further call changes nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()  # vLLM stops its engine processes itself
            try:
                process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _, left = psutil.wait_procs(_session(process.pid), timeout=2)
        for survivor in left:
            _signal(survivor, signal.SIGKILL)
        _, left = psutil.wait_procs(left, timeout=5)
        if left:
            raise ServerError(f"the server left processes behind: {[p.pid for p in left]}")

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes that are alive now."""
        return [] if self._process is None else _session(self._process.pid)

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _told(self) -> str:
        return f"its log {self.log} ends:\n{self.log_tail()}"

    def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics`` by name, summed over labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def wait_for_metrics(
        self, met: Callable[[dict[str, float]], bool], timeout_s: float = 30.0
    ) -> dict[str, float]:
        """Return the first metrics that ``met`` accepts: vLLM publishes a step's counts after its answers."""
        deadline = time.monotonic() + timeout_s
        while not met(found := self.metrics()):
            if time.monotonic() > deadline:
                hypic = {k: v for k, v in found.items() if "hypic" in k and not k.endswith("_created")}
                raise ServerError(f"the metrics did not reach their targets in {timeout_s:g} s: {hypic}")
            time.sleep(0.1)
        return found


def _session(leader: int) -> list[psutil.Process]:
    """Return the living processes of the session that ``leader`` started; the leader may have ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
