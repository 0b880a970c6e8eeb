"""An ASGI application in a thread of the test's process."""

import asyncio
import socket
import threading
from typing import Any

import uvicorn

STOP_S = 10.0


class _Server(uvicorn.Server):
    """Uvicorn's own loop looks ten times a second whether it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:  # nothing is left that could end well
            for listening in sockets or []:
                listening.close()
        else:
            await super().shutdown(sockets)


class HttpServer:
    """Listens on 127.0.0.1 as soon as it is made, until :meth:`stop` or :meth:`kill`."""

    def __init__(self, app: Any, port: int = 0, **options: Any) -> None:
        """``port`` 0: whichever is free; it is bound here, so nobody can take it in between.

        ``options``: of ``uvicorn.Config``.
        """
        # The protocol is named so that asyncio turns Nagle's algorithm off: it costs 40 ms an answer.
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = _Server(uvicorn.Config(app, **{"log_level": "critical", **options}))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End in good order: answers that have begun are ended."""
        self._end(self._server.over.set)

    def kill(self) -> None:
        """End as by SIGKILL: all connections break off."""
        self._server.force_exit = True
        self._end(self._abort)

    def _abort(self) -> None:
        self._server.over.set()
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _end(self, how: Any) -> None:
        if not self.alive:
            return
        self.loop.call_soon_threadsafe(how)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)
            assert not self.alive, "the server did not stop"
