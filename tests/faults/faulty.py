"""Things that go wrong at a test's command: a disk of its own, and a way to a server that is slow."""

import os
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from store.awkward_tiers import wait_for


class NoDisk(Exception):
    """Neither root nor a user namespace may mount here."""


class SmallDisk:
    """A file system in memory, of ``size`` bytes, in a mount namespace of its own: gone with its process,
    and with that goes the test run.  Others reach it by :attr:`path`."""

    def __init__(self, point: Path, size: int) -> None:
        self._point, self._size = point, size
        self._shell: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._point.mkdir()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        told = []
        for how in (["unshare", "-m"], ["unshare", "-Urm"]):
            self._shell = subprocess.Popen([*how, "sh"], text=True, **pipes)
            fault = self._run(f"mount -t tmpfs -o size={self._size} tmpfs {self._point}")
            if fault is None:
                return self
            told.append(f"{' '.join(how)}: {fault}")
            self.__exit__()
        raise NoDisk("; ".join(told))

    def __exit__(self, *exc: object) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.communicate()  # its input ends, and so does it

    def _run(self, command: str) -> str | None:
        """``None``, or what the command says when it fails."""
        with suppress(BrokenPipeError):
            self._shell.stdin.write(f"{command}; echo = $?\n")
            self._shell.stdin.flush()
        said = []
        for line in self._shell.stdout:
            if line.startswith("= "):
                return None if line == "= 0\n" else " ".join(said)
            said.append(line.strip())
        return " ".join(said) or "it ended"

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self._shell.pid}/root{self._point}")

    def set_writable(self, writable: bool) -> None:
        """Also while it is used: waits for a moment in which no file is being written."""
        how = "rw" if writable else "ro"
        wait_for(lambda: self._run(f"mount -o remount,{how} {self._point}") is None, f"mounted {how}")

    def fill(self) -> None:
        """Not a byte is free, also when others remove their files, until :meth:`relieve`."""
        with (self.path / "ballast").open("ab") as ballast, suppress(OSError):
            while True:
                os.write(ballast.fileno(), bytes(4096))

    def relieve(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)


class SlowWay:
    """Forwards connections to ``port`` of 127.0.0.1; answers are held up for ``delay_s``."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        way = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                way._forward(self.request, port)

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._listener = Listener(("127.0.0.1", 0), Handler)
        self.port = int(self._listener.server_address[1])
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def _forward(self, client: socket.socket, port: int) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            return  # which closes the client's
        server.settimeout(None)
        with server:
            back = threading.Thread(
                target=_pump, args=(server, client, lambda: time.sleep(self.delay_s)), daemon=True
            )
            back.start()
            _pump(client, server, lambda: None)
            back.join()


def _pump(source: socket.socket, sink: socket.socket, hold: Callable[[], None]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 20):
            hold()
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
