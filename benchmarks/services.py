"""Redis and LMCache servers of benchmarks and tests: on free ports of 127.0.0.1, gone when they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .lib.processes import free_port, launch

if TYPE_CHECKING:
    import redis

HOST = "127.0.0.1"
START_S = 90.0
STOP_S = 10.0


class ServiceMissing(Exception):
    """What a service needs is not installed; the message says what, and how to get it."""


class ServiceError(RuntimeError):
    """A service did not start; the message holds the end of its log."""


def redis_program() -> Path:
    """The machine's redis-server, or that which ``make`` put into the environment.

    Raises :class:`ServiceMissing`, also without redis-py.
    """
    try:
        import redis  # noqa: F401
    except ImportError as e:
        raise ServiceMissing("no redis-py: pip install 'vllm-hypic[redis]'") from e
    unpacked = Path(sys.prefix) / "redis" / "redis-server"
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    if unpacked.exists():
        return unpacked
    raise ServiceMissing("no redis-server: apt-get install redis-server, or python tools/fetch_redis.py VENV")


def require_lmcache() -> None:
    """Raises :class:`ServiceMissing` without the LMCache release that the tier is written for."""
    from vllm_hypic.store.tiers import lmcache

    try:
        lmcache.require_lmcache("this server")
    except ImportError as e:
        raise ServiceMissing(str(e)) from e


class Service(ABC):
    """One process that listens on ``port``, with its data in ``folder``; can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / f"{type(self).__name__}-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Its program's path and arguments."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def answers(self) -> bool:
        """One try, which may also raise ``OSError``."""
        with socket.create_connection((HOST, self.port), timeout=1):
            return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until it answers; :class:`ServiceError` when it ends or time is up."""
        if self._process is not None:
            raise ServiceError(f"{type(self).__name__} is already started")
        self._process = launch(
            self.command(),
            self.log,
            env=self.environment(),
            folder=self.folder,
            at_the_end=signal.SIGKILL,
        )
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                if self.answers():
                    return
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                how = (
                    f"does not answer within {START_S:g} s"
                    if code is None
                    else f"ended with exit code {code}"
                )
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise ServiceError(f"{type(self).__name__} {how}; its log ends:\n{tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """``kill -9`` to it and its children; may be called when nothing runs."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)

    def pause(self) -> None:
        """It accepts connections and answers nothing, until :meth:`resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ServiceError(f"{type(self).__name__} is not started")
        os.killpg(self._process.pid, number)


class RedisServer(Service):
    """A redis-server.  ``durable``: it appends every write to a file, so that a restart finds all."""

    def __init__(self, folder: Path, password: str = "", *options: str, durable: bool = True) -> None:
        super().__init__(folder)
        self.password, self.options, self.durable = password, options, durable

    @property
    def url(self) -> str:
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}{HOST}:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection beside the tier's."""
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=5)

    def command(self) -> list[str]:
        kept = ("--appendonly", "yes", "--appendfsync", "always") if self.durable else ("--appendonly", "no")
        return [
            *(str(redis_program()), "--port", str(self.port), "--bind", HOST, "--dir", str(self.folder)),
            *("--save", "", *kept),
            *(("--requirepass", self.password) if self.password else ()),
            *self.options,
        ]

    def answers(self) -> bool:
        import redis

        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


class LMCacheServer(Service):
    """``lmcache server`` with the plugin's module and ``l1_gib`` of memory; ``durable``: and a folder."""

    def __init__(self, folder: Path, l1_gib: float = 0.25, *, durable: bool = True) -> None:
        super().__init__(folder)
        self.l1_gib = l1_gib
        self.http_port = free_port()
        self.disk = folder / "disk" if durable else None

    @property
    def url(self) -> str:
        return f"tcp://{HOST}:{self.port}"

    def command(self) -> list[str]:
        require_lmcache()
        module = {"module_path": "vllm_hypic.store.tiers.lmcache_module"}
        disk = {"type": "fs_native", "base_path": str(self.disk)}
        return [
            *(sys.executable, "-m", "lmcache.cli.main", "server"),
            *(
                "--host",
                HOST,
                "--port",
                str(self.port),
                "--http-host",
                HOST,
                "--http-port",
                str(self.http_port),
            ),
            *("--l1-size-gb", str(self.l1_gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *(("--l2-adapter", json.dumps(disk)) if self.disk is not None else ()),
            *("--server-module", json.dumps(module), "--max-workers", "4", "--disable-observability"),
        ]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
