"""The secret that instances and routers share: who has it is let in, and everything is encrypted (CurveZMQ).

Both key pairs, the servers' and the clients', are derived from the secret, so that there is nothing else to
hand out: who knows the secret knows the server's public key, which a client needs before its first byte, and
has the one client key that a server admits.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ..errors import ConfigError

_LEAST_BYTES = 32
_MOST_BYTES = 65536
_DOMAIN = b"hypic"
_ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks, within one context, whether a client is admitted (ZeroMQ RFC 27)."""


class Secret:
    """Sets the CURVE options of sockets.  Immutable; may be used by any number of threads."""

    def __init__(self, secret: bytes) -> None:
        """:class:`ConfigError` when ``secret`` is shorter than 32 bytes."""
        if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
            raise ConfigError(
                f"segment_parallel: a secret of {len(secret)} bytes: expected {_LEAST_BYTES} to "
                f"{_MOST_BYTES}, for example those of `openssl rand -hex 32`"
            )
        if not zmq.has("curve"):
            raise ConfigError("segment_parallel: this libzmq has no CURVE: expected one built with libsodium")
        self._server_public, self._server_private = _key_pair(secret, b"hypic server")
        self._client_public, self._client_private = _key_pair(secret, b"hypic client")

    @staticmethod
    def read(path: str | None) -> Secret | None:
        """The secret in a file, white space around it apart; ``None`` for no path.

        :class:`ConfigError` names a file that cannot be read, or holds too little.
        """
        if path is None:
            return None
        try:
            with Path(path).open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
        except OSError as e:
            raise ConfigError(
                f"hypic config: segment_parallel.secret_file={path!r}: cannot be read: {e.strerror}; "
                f"expected a file of at least {_LEAST_BYTES} bytes"
            ) from e
        try:
            return Secret(text.strip())
        except ConfigError as e:
            raise ConfigError(f"hypic config: segment_parallel.secret_file={path!r}: {e}") from e

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Before ``bind``: from now on ``socket`` admits only clients that have the secret.

        The first such socket of a context starts a thread that answers for all of them; it ends with the
        context.  One secret per context: a second one's clients would be turned away.
        """
        self._answer_for(zmq.Context.shadow(socket.context.underlying))
        socket.curve_server = True
        socket.curve_publickey = self._server_public
        socket.curve_secretkey = self._server_private
        socket.zap_domain = _DOMAIN
        # With nobody to ask, nobody is let in; libzmq's default is everybody.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Before ``connect``: ``socket`` talks only to servers that have the secret."""
        socket.curve_serverkey = self._server_public
        socket.curve_publickey = self._client_public
        socket.curve_secretkey = self._client_private

    def _answer_for(self, context: zmq.Context[Any]) -> None:
        asked = context.socket(zmq.REP)
        asked.linger = 0
        try:
            asked.bind(_ZAP)
        except zmq.ZMQError as e:
            asked.close()
            if e.errno == zmq.EADDRINUSE:
                return  # another socket of the context has started it
            raise
        admitted = z85.decode(self._client_public)
        threading.Thread(target=_answer, args=(asked, admitted), name="hypic-zap", daemon=True).start()


def _answer(asked: zmq.Socket[Any], admitted: bytes) -> None:
    """Admit the client whose public key is ``admitted``, until the context is terminated."""
    with asked:
        while True:
            try:
                frames = asked.recv_multipart()
                asked.send_multipart(_verdict(frames, admitted))
            except zmq.ContextTerminated:
                return


def _verdict(frames: list[bytes], admitted: bytes) -> list[bytes]:
    request = frames[1] if len(frames) > 1 else b""
    known = (
        len(frames) == 7
        and frames[0] == b"1.0"
        and frames[2] == _DOMAIN
        and frames[5] == b"CURVE"
        and hmac.compare_digest(frames[6], admitted)
    )
    status, text = (b"200", b"OK") if known else (b"400", b"unknown client")
    return [b"1.0", request, status, text, b"", b""]


def _key_pair(secret: bytes, person: bytes) -> tuple[bytes, bytes]:
    """Public and private key in Z85, as libzmq takes them; different for each ``person``."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=person).digest())
    return zmq.curve_public(private), private
