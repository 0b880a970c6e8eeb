"""Redis and LMCache servers of a benchmark: on free ports of 127.0.0.1, empty, gone when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..serving import free_port

START_S = 90.0
STOP_S = 10.0
HOST = "127.0.0.1"

# The kernel kills the server with the thread that started it; the check closes the gap before that request.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the benchmark is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


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
    from ..store.tiers import lmcache

    try:
        lmcache.require_lmcache("this row")
    except ImportError as e:
        raise ServiceMissing(str(e)) from e


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """An empty Redis server that keeps everything in memory; its URL."""
    program, port = redis_program(), free_port()
    command = [str(program), "--port", str(port), "--bind", HOST, "--dir", str(folder)]
    with _service(
        "redis", [*command, "--save", "", "--appendonly", "no"], port, folder / "redis.log", os.environ
    ):
        yield f"redis://{HOST}:{port}/0"


@contextmanager
def lmcache_server(folder: Path, l1_gib: float) -> Iterator[str]:
    """An LMCache server with the plugin's module and ``l1_gib`` of memory; its URL."""
    require_lmcache()
    port, http_port = free_port(), free_port()
    module = {"module_path": "vllm_hypic.store.tiers.lmcache_module"}
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)),
        *("--l1-size-gb", str(l1_gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *("--server-module", json.dumps(module), "--max-workers", "4", "--disable-observability"),
    ]
    quiet = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    with _service("lmcache", command, port, folder / "lmcache.log", quiet):
        yield f"tcp://{HOST}:{port}"


@contextmanager
def _service(
    name: str, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        _wait(name, process, port, log)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def _wait(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            how = f"is not up after {START_S:g} s" if code is None else f"ended with exit code {code}"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServiceError(f"the {name} server {how}; its log ends:\n{tail}")
        time.sleep(0.05)
