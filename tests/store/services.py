"""Real servers for tests of the remote tiers: on free ports of 127.0.0.1, data in a folder of the test's.

Each is a context manager that can be killed and started again on its port.  A server ends with the
thread that started it, whatever ended that: nothing outlives a killed test run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
import redis

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0

# The kernel ends the process with its parent; exec keeps the request.  The check closes the gap before it.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def redis_program() -> Path | None:
    """The machine's redis-server, or the one that the set-up unpacked into the environment."""
    unpacked = Path(sys.prefix) / "redis" / "redis-server"
    on_path = shutil.which("redis-server")
    return Path(on_path) if on_path else unpacked if unpacked.exists() else None


needs_redis = pytest.mark.skipif(
    redis_program() is None,
    reason="no redis-server: neither on PATH nor could `make venv` fetch it (see tools/fetch_redis.py)",
)


class Service:
    """One process that answers on ``port``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / f"{type(self).__name__}-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def answers(self) -> bool:
        """One try, which may also raise OSError."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until it answers."""
        assert self._process is None, "already started"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment(),
                start_new_session=True,
            )
        try:
            wait_until(self._up, START_TIMEOUT_S, f"{type(self).__name__} answers")
        except BaseException:
            self.kill()
            raise

    def _up(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"{self.command()[0]} ended with {code}:\n{self.log.read_text()[-3000:]}"
        try:
            return self.answers()
        except OSError:
            return False

    def kill(self) -> None:
        """``kill -9`` to it and its children; may be called when nothing runs."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def pause(self) -> None:
        """It accepts connections and answers nothing, until :meth:`resume`."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)


class RedisServer(Service):
    """A redis-server that appends every write to a file, so that a restart finds all."""

    def __init__(self, folder: Path, password: str = "", *options: str) -> None:
        super().__init__(folder)
        self.password, self.options = password, options

    @property
    def url(self) -> str:
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection beside the tier's."""
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def command(self) -> list[str]:
        program = redis_program()
        assert program is not None
        return [
            *(str(program), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
            *(("--requirepass", self.password) if self.password else ()),
            *self.options,
        ]

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


class LMCacheServer(Service):
    """``lmcache server`` with the project's server module, memory and one folder on disk."""

    def __init__(self, folder: Path, l1_gb: float = 0.25) -> None:
        super().__init__(folder)
        self.l1_gb = l1_gb
        self.http_port = free_port()
        self.disk = folder / "disk"

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        module = {"module_path": "vllm_hypic.store.tiers.lmcache_module"}
        disk = {"type": "fs_native", "base_path": str(self.disk)}
        return [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http_port)),
            *("--l1-size-gb", str(self.l1_gb), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(disk), "--server-module", json.dumps(module)),
            *("--max-workers", "4", "--disable-observability"),
        ]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
