"""Child processes that end with the thread that started them, and ports for them to listen on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The kernel signals the process when the thread that started it ends, be it by SIGKILL: nothing outlives a
# dead run. exec keeps the process id and the request; the check closes the gap before it. A signal may be
# lost: vLLM drops the one that arrives while its engine starts (`zmq_socket_ctx` swallows KeyboardInterrupt).
# So a guard, outside the session, ends what is still there when the owner has been dead for a while.
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
"""Time to end for a process whose owner is gone."""
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

    ``at_the_end``: what the kernel sends it when the thread that called this ends.  Where it lives on for
    :data:`GRACE_S` after the whole process that called this, it is killed with its process group.
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
    """The command by which :func:`launch` starts ``command``; for a session of its own."""
    numbers = map(str, (os.getpid(), int(at_the_end), int(1000 * GRACE_S)))
    return [sys.executable, "-c", _LAUNCH, *numbers, *command]


def reserve_port(port: int = 0) -> socket.socket:
    """A socket on a port of 127.0.0.1, this one if given, that nobody else is given as long as it is open.

    Servers that set ``SO_REUSEADDR``, as all do here, can listen on that port meanwhile, and again after
    they were killed.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", port))
    # Only now: with it, a port that another process has reserved would do for an explicit bind.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, reserved until this process ends."""
    _RESERVED.append(reserve_port())
    port: int = _RESERVED[-1].getsockname()[1]
    return port


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row; each as :func:`free_port`."""
    while True:
        first = free_port()
        try:
            _RESERVED.extend([reserve_port(first + i) for i in range(1, count)])
        except (OSError, OverflowError):
            continue  # somebody has one of them
        return first
