"""Python programs that start without importing vLLM: they are forked from a process that has done so.

``vllm serve`` takes 10 s of one core to import what it needs, and its engine's process takes them again.  The
programs that :func:`run` and :func:`launch` start are real processes, with arguments, an environment, files
and a session of their own; only their imports are shared.  Programs with other values of :data:`READ_EARLY`
are started as usual.  All workers of a test run share the imports (:func:`share`): each talks to a fork of
the process that has them, which forks the worker's programs.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import context
from pathlib import Path
from typing import Any

from benchmarks.lib import processes

READ_EARLY = (
    *("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY", "LD_PRELOAD", "LD_LIBRARY_PATH", "TRITON_INTERPRET"),
    *("HF_HUB_OFFLINE", "PYTHONHASHSEED", "VLLM_LOGGING_LEVEL", "VLLM_TARGET_DEVICE"),
)
"""Variables that a library reads while it is imported.  A program for which one differs is not forked."""
PIPE = 63
"""The file of a process of :func:`host` that its owner chose."""
_PR_SET_PDEATHSIG = 1

shared: str | None = None
"""Address of a process that has imported vLLM for several others; ``None``: this one starts its own."""


class ForkedProcess:
    """What :class:`subprocess.Popen` offers of a process that another one forked."""

    def __init__(self, server: _Server, pid: int, fd: int, args: Sequence[str]) -> None:
        """``fd``: a file that is readable once the process has ended (``os.pidfd_open``)."""
        self.args, self.pid, self.returncode = list(args), pid, None
        self._server, self._fd, self._lock = server, fd, threading.Lock()

    def __del__(self) -> None:
        os.close(self._fd)

    def poll(self) -> int | None:
        """The exit code, as ``subprocess`` gives it, or ``None`` while the process lives."""
        with self._lock:
            if self.returncode is None and self._ended(0):
                self.returncode, _ = self._server.ask({"code": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """End whatever is left of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def _ended(self, timeout: float | None) -> bool:
        ends = select.poll()
        ends.register(self._fd, select.POLLIN)
        return bool(ends.poll(None if timeout is None else 1000 * timeout))


def launch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    at_the_end: signal.Signals = signal.SIGTERM,
) -> Any:
    """As :func:`benchmarks.lib.processes.launch`.

    The process ends with this test run, not with the thread that calls this.
    """
    environment = dict(os.environ if env is None else env)
    if "--enforce-eager" in command:
        # The sampler's count of better tokens would be compiled for every new shape: seconds each.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    if not _may_be_forked(command, environment):
        return processes.launch(command, log, env=env, folder=folder, at_the_end=at_the_end)
    with log.open("ab") as out:
        files = out.fileno(), out.fileno()
        return _server().start(command, environment, folder, *files, at_the_end=at_the_end)


def host(code: str, log: Path, pipe: int) -> ForkedProcess:
    """A process that runs ``code`` with ``pipe`` as its file :data:`PIPE`; what it prints goes to ``log``."""
    command = [sys.executable, "-c", code]
    with log.open("ab") as out:
        files = out.fileno(), out.fileno(), pipe
        return _server().start(command, dict(os.environ), None, *files, at_the_end=signal.SIGKILL)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 600.0,
    fork: bool = True,
) -> subprocess.CompletedProcess[str]:
    """As :func:`subprocess.run` with what was printed captured as text.  The whole group is ended at last.

    ``fork=False``: for a program that changes what vLLM is when it is imported.
    """
    words = [str(word) for word in command]
    environment = dict(os.environ if env is None else env)
    if not fork or not _may_be_forked(words, environment):
        return _run_as_usual(words, environment, cwd, timeout)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = out.fileno(), err.fileno()
        process = _server().start(words, environment, cwd, *files, at_the_end=signal.SIGTERM)
        try:
            code = process.wait(timeout)
        finally:
            process.end()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _run_as_usual(
    words: list[str], environment: dict[str, str], folder: str | Path | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        processes.guarded(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def _may_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    python = command[0] == sys.executable and len(command) > 1
    same = all(environment.get(name) == os.environ.get(name) for name in READ_EARLY)
    return python and same and (command[1] in ("-c", "-m") or command[1].endswith(".py"))


# -- the process that tests talk to ------------------------------------------------------------------


@cache
def _server() -> _Server:
    return _Server()


def share() -> str:
    """Start a process that imports vLLM when a test process first connects; return its socket's address.

    The process ends with this one.
    """
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, theirs:
        listener.bind(str(Path(tempfile.mkdtemp(prefix="forks-")) / "socket"))
        listener.listen(socket.SOMAXCONN)
        files = listener.fileno(), theirs.fileno()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        subprocess.Popen(
            [sys.executable, "-m", "lib.forked", *map(str, files)],
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(ours.close)
        return str(listener.getsockname())


class _Server:
    """Speaks with the process that forks for this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(shared or share())
        atexit.register(self._socket.close)

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: str | Path | None,
        *files: int,
        at_the_end: signal.Signals,
    ) -> ForkedProcess:
        """``files`` become what it prints to, as output and as errors, and its :data:`PIPE`."""
        asked = {
            "command": list(command[1:]),
            "environment": environment,
            "folder": str(folder or Path.cwd()),
            "at_the_end": int(at_the_end),
        }
        pid, [fd] = self.ask(asked, *files)
        return ForkedProcess(self, pid, fd, command)

    def ask(self, message: dict[str, Any], *files: int) -> tuple[int, list[int]]:
        """The number, and the files, that are answered."""
        with self._lock:
            _send(self._socket, message, files)
            answer, found = _receive(self._socket)
        assert answer is not None, "the process that forks is gone"
        return int(answer["number"]), found


def _send(to: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    to.sendmsg([len(data).to_bytes(8, "little")], rights)
    to.sendall(data)


def _receive(of: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the files that came with it; ``None`` when the other end is gone."""
    head, files, _, _ = socket.recv_fds(of, 8, 3)
    if len(head) < 8:
        return None, files
    left, data = int.from_bytes(head, "little"), b""
    while len(data) < left:
        data += of.recv(left - len(data))
    return json.loads(data), files


# -- the process that forks --------------------------------------------------------------------------


def _share(listener: socket.socket, owner: socket.socket) -> None:
    """Serve each test process that connects in a fork of this process, until the owner is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends = select.poll()
    for waited in (listener, owner):
        ends.register(waited, select.POLLIN)
    while owner.fileno() not in dict(ends.poll()):
        asks, _ = listener.accept()
        from engine import preloaded  # noqa: F401  what it imports is the point

        if os.fork() == 0:
            listener.close()
            owner.close()
            _serve(asks)
            os._exit(0)
        asks.close()
    shutil.rmtree(Path(listener.getsockname()).parent)


def _serve(asks: socket.socket) -> None:
    """Fork what is asked for until the test process is gone; then nothing of it is left."""
    groups: list[int] = []
    codes: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def left() -> list[int]:
        """A process that has just begun has no group yet."""
        return [group for group in groups if group not in codes or _lives(group)]

    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, files = _receive(asks)
        if message is None:
            break
        if "code" in message:
            while (pid := message["code"]) not in codes:
                time.sleep(0.001)
            _send(asks, {"number": codes[pid]})
            continue
        # Not reaped before there is a file by which it is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := os.fork()) == 0:
            asks.close()
            _become(message, files)
        codes.pop(pid, None)
        fd = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        groups = [*left(), pid]
        _send(asks, {"number": pid}, [fd])
        for file in (*files, fd):
            os.close(file)
    deadline = time.monotonic() + processes.GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        while groups and time.monotonic() < deadline:
            groups = left()
            time.sleep(0.1)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _become(message: dict[str, Any], files: list[int]) -> None:
    """In the child: be the program that was asked for."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, message["at_the_end"])
        # First out of the way of one another.
        away = [fcntl.fcntl(file, fcntl.F_DUPFD, PIPE + 1) for file in files]
        for file, number in zip(away, (1, 2, PIPE), strict=False):
            os.dup2(file, number)
            os.close(file)
        os.chdir(message["folder"])
        os.environ.clear()
        os.environ.update(message["environment"])
        _be_on_its_own()
        code = _run(message["command"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_on_its_own() -> None:
    """Undo what a process has from the one that forked it, and have its own children forked, too."""
    import random

    import numpy
    import torch._dynamo

    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    numpy.random.seed()
    atexit._clear()
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    # vLLM asks for processes that import everything once more.
    context._concrete_contexts["spawn"] = _Children()  # type: ignore[attr-defined]


class _Child(context.ForkProcess):
    """A process of a forked program; it tells its parent of no signals."""

    def run(self) -> None:
        signal.set_wakeup_fd(-1)
        _close_ports()
        super().run()


class _Children(context.ForkContext):
    Process = _Child


def _close_ports() -> None:
    """Do not answer at the ports of the parent."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as found:
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.family == socket.AF_INET:
                    os.close(fd)


def _run(words: list[str]) -> int:
    """Run Python's arguments ``-m module ...``, ``-c code ...`` or ``file.py ...``; the exit code."""
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return 0 if e.code is None else int(e.code)
    return 0


if __name__ == "__main__":
    import setproctitle

    sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    for each in sockets:
        each.set_inheritable(False)
    # It finds the words to replace only before anything has changed the environment.
    setproctitle.setproctitle("process that forks")
    _share(*sockets)
