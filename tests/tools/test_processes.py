"""What a run started ends with it, whether it listens to signals or not; its ports are its own."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.processes import reserve_port

pytestmark = pytest.mark.timeout(120)
OWNER = """
import sys
from pathlib import Path
from benchmarks.lib import processes
processes.GRACE_S = float(sys.argv[1])
child = processes.launch([sys.executable, "-u", "-c", sys.argv[3]], Path(sys.argv[2]))
print(child.pid, flush=True)
print(child.wait(), flush=True)
sys.stdin.read()
"""
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid)
time.sleep(600)
"""


class Owner:
    """A process that launches a program, and the program's."""

    def __init__(self, log: Path, program: str, *, grace_s: float) -> None:
        command = [sys.executable, "-c", OWNER, str(grace_s), str(log), program]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.launched = psutil.Process(int(self.line()))
        self.guard = self._guard(program)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def _guard(self, program: str) -> psutil.Process:
        """It is the launched process as it was before it became the program, in a session of its own."""
        while True:
            for found in psutil.process_iter(["cmdline"]):
                command = found.info["cmdline"] or [""]
                if command[-1] == program and found.pid not in (self.process.pid, self.launched.pid):
                    return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def told(log: Path) -> str:
    """What the program wrote, once it has written a line."""
    while not (text := log.read_text()).endswith("\n"):
        time.sleep(0.01)
    return text


def all_end(*processes: psutil.Process) -> bool:
    return not psutil.wait_procs(processes, timeout=60)[1]


def test_who_is_deaf_to_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "log", DEAF, grace_s=0.5)
    child = psutil.Process(int(told(tmp_path / "log")))
    owner.kill()
    assert all_end(owner.launched, child, owner.guard)


def test_who_listens_ends_before_the_grace_is_over(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "log", "import time; print(1); time.sleep(600)", grace_s=3600)
    told(tmp_path / "log")
    owner.kill()
    assert all_end(owner.launched, owner.guard)


def test_no_guard_outlives_who_it_guards(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "log", f"import time; print({str(tmp_path)!r}); time.sleep(600)", grace_s=3600)
    owner.launched.kill()
    assert owner.line() == f"{-signal.SIGKILL}\n"
    assert all_end(owner.guard)
    owner.kill()


def test_a_reserved_port_is_kept_for_servers() -> None:
    """Nobody else gets it, before a server listens on it, meanwhile, and after the server's end."""
    with reserve_port() as held:
        address = held.getsockname()
        for _ in range(2):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(address)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            with socket.create_server(address) as server, socket.create_connection(address) as client:
                server.accept()[0].close()
                assert client.recv(1) == b""
