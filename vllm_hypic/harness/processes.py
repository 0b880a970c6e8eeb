"""Child processes that end with the thread that started them, and ports for them to listen on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The kernel ends the process with the thread that started it, be it by SIGKILL: nothing outlives a dead run.
# exec keeps the process id and the request; the check closes the gap before it.
_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execv(sys.argv[3], sys.argv[3:])
"""
_RESERVED: list[socket.socket] = []


def launch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    at_the_end: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start ``command`` (its program as a path) in a session of its own, its output appended to ``log``.

    ``at_the_end``: what the kernel sends it when the thread that called this ends.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), str(int(at_the_end)), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=None if env is None else dict(env),
            start_new_session=True,
        )


def reserve_port() -> socket.socket:
    """A socket on a port of 127.0.0.1 that nobody else is given as long as it is open.

    Servers that set ``SO_REUSEADDR``, as all do here, can listen on that port meanwhile, and again after
    they were killed.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    # Only now: with it, a port that another process has reserved would do for an explicit bind.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, reserved until this process ends."""
    _RESERVED.append(reserve_port())
    port: int = _RESERVED[-1].getsockname()[1]
    return port
