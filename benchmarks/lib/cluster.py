"""Real servers on one machine for the demo, benchmarks and tests: workers, combine nodes, routers.

    with Cluster(Setup(model)) as cluster:
        answer = ask(cluster.router, "/v1/completions", {"prompt": prompt, "max_tokens": 8})

No server is left running after the ``with`` block, whatever happens inside.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from .processes import free_ports
from .serving import Server, ServerError

FAILURES = "hypic_router_failures_total"
_MOST_STARTED = 64
"""Limit on the servers that a cluster starts in its life; each server needs a thread that stays."""


@dataclass(frozen=True)
class Setup:
    """Settings of the servers; all other settings are vLLM's defaults."""

    model: Path
    workers: int = 2
    combines: int = 1
    threads: int = 1
    """OpenMP threads of each server."""
    eager: bool = True
    context: int = 16384
    """Longest prompt with its answer, in tokens."""
    cache_bytes: int = 2**30
    """Bytes of vLLM's own KV cache."""
    pool_bytes: int = 2**30
    """Bytes of the pool of records, in addition to vLLM's KV cache."""
    at_once: int = 1
    """Requests that run together (``--max-num-seqs``).  With 1 every segment is prefilled alone, so that its
    record is the same bit for bit on every server."""
    in_process: bool = True
    """Whether engine and worker share a process.  vLLM's default on CPUs is two processes that wait for each
    other by spinning: several servers would take the cores from each other."""
    ranks: int = 1
    """Tensor-parallel ranks of each server; several ranks need ``in_process`` to be false."""
    options: tuple[str, ...] = ()
    """Further options of ``vllm serve``."""
    hypic: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the plugin."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the plugin's section ``segment_parallel``."""
    router: tuple[str, ...] = ()
    """Further options of ``vllm-hypic router``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of each server."""


class Instance(Server):
    """A ``vllm serve`` process that takes part in segment parallelism."""

    def __init__(self, name: str, setup: Setup, log: Path, *, port: int | None = None) -> None:
        """``port``: HTTP port of the instance to replace, or ``None`` for a new port; other ports are new."""
        self.name = name
        self.transport = setup.parallel.get("transport", "tcp")
        self.events, self.listen = (f"tcp://127.0.0.1:{free_ports(n)}" for n in (1, setup.ranks))
        options = {
            "pool_bytes": setup.pool_bytes,
            **setup.hypic,
            "segment_parallel": {**setup.parallel, "listen": self.listen, "events": self.events},
        }
        super().__init__(
            setup.model,
            *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": options})),
            *("--max-num-seqs", str(setup.at_once), "--max-model-len", str(setup.context)),
            *("--kv-cache-memory-bytes", str(setup.cache_bytes), "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *(["--enforce-eager"] if setup.eager else []),
            *(["--distributed-executor-backend", "uni"] if setup.in_process else []),
            *(["--tensor-parallel-size", str(setup.ranks)] if setup.ranks > 1 else []),
            *setup.options,
            env={
                "VLLM_PLUGINS": "hypic,hypic_cache",
                # vLLM's CPU platform would overrule the option above; the engine stays a process of its own.
                **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if setup.in_process else {}),
                # Bound threads of several servers would share one core while another is idle.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(setup.threads),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                **setup.env,
            },
            log=log,
            start_timeout_s=600.0,
        )
        if port is not None:
            self.port = port


class Router(Server):
    """A ``vllm-hypic router`` process."""

    health = "/healthcheck"
    program = ("-c", "from vllm_hypic.cli import main; main()")

    def __init__(
        self,
        prefill: Sequence[str],
        combine: Sequence[str],
        *options: str,
        log: Path,
        port: int | None = None,
    ) -> None:
        where = [*(w for url in prefill for w in ("--prefill", url))]
        where += [*(w for url in combine for w in ("--combine", url))]
        super().__init__("", *where, *options, log=log, start_timeout_s=60.0)
        self.name = "router"
        if port is not None:
            self.port = port

    @property
    def command(self) -> list[str]:
        return ["vllm-hypic", "router", *self.options, "--host", "127.0.0.1", "--port", str(self.port)]

    def samples(self) -> dict[tuple[str, ...], float]:
        """Return ``/metrics`` by name and values of labels (in the order of the labels' names)."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        return {
            (sample.name, *(sample.labels[k] for k in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def wait_for(
        self, met: Callable[[dict[tuple[str, ...], float]], bool], what: str, timeout_s: float = 60.0
    ) -> dict[tuple[str, ...], float]:
        """Return the first :meth:`samples` that ``met`` accepts; at timeout raise :class:`ServerError` with
        ``what``."""
        deadline = time.monotonic() + timeout_s
        while not met(found := self.samples()):
            if time.monotonic() > deadline:
                told = {k: v for k, v in found.items() if v and not k[0].endswith(("_bucket", "_created"))}
                raise ServerError(f"no sign after {timeout_s:g} s that {what}; the router's metrics: {told}")
            time.sleep(0.02)
        return found

    def ready(self, instances: int, timeout_s: float = 60.0) -> None:
        """Wait until the router knows ``instances`` instances to be up."""
        self.wait_for(
            lambda found: sum(v for k, v in found.items() if k[0] == "hypic_router_instance_up") >= instances,
            f"{instances} instances are up",
            timeout_s,
        )


class Cluster:
    """Workers, combine nodes and a router in front of them, as a context manager.

    Entering starts all instances at once, then the router, and waits until the router knows each instance.
    Leaving, also by an error, SIGTERM or SIGHUP, ends all servers and raises :class:`ServerError` if any
    process survives.  Logs are deleted, but after an error they stay in :attr:`folder`.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.folder = Path(tempfile.mkdtemp(prefix="hypic-cluster-"))
        self.workers = [self.instance(f"worker{i}") for i in range(setup.workers)]
        self.combines = [self.instance(f"combine{i}") for i in range(setup.combines)]
        self.router = self._router(self.workers, self.combines, *setup.router)
        self._started: list[Server] = []
        self._starting: set[Server] = set()
        self._lock, self._closing = threading.Lock(), False
        # A server ends with the thread that started it: these threads stay as long as the cluster.
        self._keepers = ThreadPoolExecutor(_MOST_STARTED, thread_name_prefix="keeper")
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def instances(self) -> list[Instance]:
        return [*self.workers, *self.combines]

    def __enter__(self) -> Self:
        self._on_signals()
        try:
            self.start(*self.instances)
            self.start(self.router)
            self.router.ready(len(self.instances))
        except BaseException as e:
            self._close(keep_logs=isinstance(e, Exception))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._close(keep_logs=kind is not None and issubclass(kind, Exception))

    def start(self, *servers: Server) -> None:
        """Start servers, all at once; raise the first failure when all servers have been tried."""
        self._started += servers
        _all([self._keepers.submit(self._start, server) for server in servers])

    def stop(self, *servers: Server) -> None:
        """End servers, all at once, also servers that a test has paused."""
        for server in servers:
            resume(server)
        _all([self._keepers.submit(server.stop) for server in servers])

    def replace(self, old: Instance, setup: Setup | None = None) -> Instance:
        """End ``old``, and start and return another instance at its URL, with ``setup`` if given."""
        kind = self.workers if old in self.workers else self.combines
        self.stop(old)
        new = self.instance(old.name, setup, port=old.port)
        kind[kind.index(old)] = new
        self.start(new)
        return new

    def restart_router(self) -> None:
        """End the router and start another router at its URL, without the first router's state."""
        old = self.router
        self.stop(old)
        self.router = self._router(self.workers, self.combines, *self.setup.router, port=old.port)
        self.start(self.router)

    def another_router(self, workers: Sequence[Instance], *options: str) -> Router:
        """Start and return a further router, with only these workers, the same combine nodes and further
        ``options``; the router is up and knows all instances."""
        router = self._router(workers, self.combines, *self.setup.router, *options)
        self.start(router)
        router.ready(len(workers) + len(self.combines))
        return router

    def instance(self, name: str, setup: Setup | None = None, *, port: int | None = None) -> Instance:
        """Return a new instance, not started."""
        return Instance(name, setup or self.setup, self._log(name), port=port)

    def _router(
        self,
        workers: Sequence[Instance],
        combines: Sequence[Instance],
        *options: str,
        port: int | None = None,
    ) -> Router:
        prefill, combine = [i.url for i in workers], [i.url for i in combines]
        return Router(prefill, combine, *options, log=self._log("router"), port=port)

    def _log(self, name: str) -> Path:
        taken = len(list(self.folder.glob(f"{name}-*.log")))
        path = self.folder / f"{name}-{taken}.log"
        path.touch()
        return path

    def _start(self, server: Server) -> None:
        """Start a server in a keeper's thread; :meth:`_close` knows it even if an interrupt has kept
        :meth:`start` from waiting."""
        with self._lock:
            if self._closing:
                return
            self._starting.add(server)
        try:
            server.start()
        finally:
            self._starting.discard(server)

    def _close(self, *, keep_logs: bool) -> None:
        with self._lock:
            self._closing = True
        processes = [p for s in self._started for p in s.processes()]
        try:
            self.stop(*self._started)
            while self._starting:  # a server was launched after its stop
                time.sleep(0.1)
                self.stop(*self._started)
            left = [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if left:
                raise ServerError(f"processes {left} are still alive")
        finally:
            self._keepers.shutdown()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if not keep_logs:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _on_signals(self) -> None:
        """Turn signals into an exit: by default a signal ends a process without its context managers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _leave)


def pause(server: Server, *names: str) -> None:
    """Send SIGSTOP to the server's processes, or only to processes named by ``names`` in a command line."""
    found = [p for p in server.processes() if not names or any(n in " ".join(p.cmdline()) for n in names)]
    if not found:
        raise ServerError(f"no process of {shlex.join(server.command)} is named {' or '.join(names)}")
    for process in found:
        process.suspend()


def resume(server: Server) -> None:
    """Send SIGCONT to all of the server's processes."""
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _all(futures: Sequence[Future[None]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
