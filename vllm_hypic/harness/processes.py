"""Child processes that end with the thread that started them, and ports for them to listen on."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
_PORTS = (10000, 32768)
"""Below those that Linux gives to outgoing connections: a server listens seconds after it got its port."""


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


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, and that no outgoing connection will be given."""
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
