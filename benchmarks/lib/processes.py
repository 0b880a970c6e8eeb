"""Child processes that end with the thread that started them, and ports for them to listen on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The kernel signals the process when the thread that started it ends, even by SIGKILL: no process outlives a
# dead run. exec keeps the process id and the request; the check closes the gap before it. A signal may be
# lost: vLLM drops a signal that arrives while an engine starts (`zmq_socket_ctx` swallows KeyboardInterrupt).
# Therefore a guard outside the session ends the process group some time after the owner's death.
_LAUNCH = """
import ctypes, os, select, signal, sys
owner, number, grace_ms, program = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
ctypes.CDLL(None).prctl(1, number)
theirs, ours, group = os.pidfd_open(owner), os.pidfd_open(os.getpid()), os.getpid()
if os.getppid() != owner:
    sys.exit("the parent process is gone")
if between := os.fork():
    os.waitpid(between, 0)
    os.execv(program[0], program)
if os.fork():
    os._exit(0)
os.setsid()
ends = select.poll()
ends.register(theirs, select.POLLIN)
ends.register(ours, select.POLLIN)
if theirs in dict(ends.poll()):
    ends.unregister(theirs)
    ends.poll(grace_ms)
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
os._exit(0)
"""
GRACE_S = 15.0
"""Seconds that a process has to end after its owner's death."""
_RESERVED: list[socket.socket] = []


def launch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    at_the_end: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start ``command`` (its program as a path) in a session of its own, and append its output to ``log``.

    ``at_the_end``: the signal that the kernel sends when the calling thread ends.  A command that is alive
    :data:`GRACE_S` seconds after the end of the calling process is killed with its process group.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            guarded(command, at_the_end),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=None if env is None else dict(env),
            start_new_session=True,
        )


def guarded(command: Sequence[str], at_the_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """Return the command with which :func:`launch` starts ``command``; run it in a session of its own."""
    numbers = map(str, (os.getpid(), int(at_the_end), int(1000 * GRACE_S)))
    return [sys.executable, "-c", _LAUNCH, *numbers, *command]


def reserve_port(port: int = 0) -> socket.socket:
    """Return a socket that reserves a port of 127.0.0.1 while it is open; ``port`` 0 means any free port.

    Servers that set ``SO_REUSEADDR``, as all servers here do, can listen on that port meanwhile, and again
    after they were killed.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", port))
    # Set after the bind: with this option, an explicit bind would accept another process's reserved port.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener, reserved until this process ends."""
    _RESERVED.append(reserve_port())
    port: int = _RESERVED[-1].getsockname()[1]
    return port


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive ports, each reserved as by :func:`free_port`."""
    while True:
        first = free_port()
        try:
            _RESERVED.extend([reserve_port(first + i) for i in range(1, count)])
        except (OSError, OverflowError):
            continue  # another process has a port of this row
        return first
