"""The secret of instances and routers: sockets admit only its holders and encrypt all data (CurveZMQ).

Both key pairs, for servers and for clients, are derived from the secret, so that operators distribute nothing
else.  A holder of the secret knows the server's public key, which a client needs before its first byte, and
has the only client key that a server admits.

On one machine sockets need no secret.  Permits need a secret (``permits.py``), because other users may reach
HTTP ports.  Without a file, the user's processes share a secret, which the first process creates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ..errors import ConfigError

_LEAST_BYTES = 32
_MOST_BYTES = 65536
_OWN = "segment-parallel-secret"
_DOMAIN = b"hypic"
_ZAP = "inproc://zeromq.zap.01"
"""Endpoint where libzmq asks, within one context, whether a client is admitted (ZeroMQ RFC 27)."""


class Secret:
    """Set the CURVE options of sockets.  Instances are immutable; any number of threads may use them."""

    def __init__(self, secret: bytes) -> None:
        """Derive the keys.  Raises :class:`ConfigError` unless ``secret`` has 32 to 65536 bytes, and without
        CURVE in libzmq."""
        _check_length(secret)
        if not zmq.has("curve"):
            raise ConfigError("segment_parallel: this libzmq has no CURVE: install a libzmq with libsodium")
        self._server_public, self._server_private = _key_pair(secret, b"hypic server")
        self._client_public, self._client_private = _key_pair(secret, b"hypic client")

    @staticmethod
    def read(path: str | None) -> Secret | None:
        """Return the secret in a file, without surrounding white space; ``None`` without a path.

        Raises :class:`ConfigError` with the name of a file that cannot be read, or is too short or long.
        """
        return None if path is None else Secret(_of_file(path))

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Make ``socket`` admit only clients that have the secret; call this before ``bind``.

        The first such socket of a context starts a thread that admits clients for the whole context, and ends
        with the context.  A context can have only one secret: clients of a second secret would be rejected.
        """
        self._answer_for(zmq.Context.shadow(socket.context.underlying))
        socket.curve_server = True
        socket.curve_publickey = self._server_public
        socket.curve_secretkey = self._server_private
        socket.zap_domain = _DOMAIN
        # If the thread that admits clients is missing, reject all clients; libzmq would admit all by default.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Make ``socket`` talk only to servers that have the secret; call this before ``connect``."""
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
                return  # another socket of the context has started the thread
            raise
        admitted = z85.decode(self._client_public)
        threading.Thread(target=_answer, args=(asked, admitted), name="hypic-zap", daemon=True).start()


def secret_of(path: str | None) -> bytes:
    """Return the secret in a file, without surrounding white space; ``None``: this user's on this machine.

    The user's secret lies in ``vllm-hypic/segment-parallel-secret`` below ``XDG_STATE_HOME``
    (``~/.local/state``); a missing file is created.  Raises :class:`ConfigError` with the name of a file that
    cannot be read or created, or is too short or long.  The same error names a user's secret that another
    user owns or can access.
    """
    if path is not None:
        return _of_file(path)
    own = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "vllm-hypic" / _OWN
    try:
        if not own.exists():
            _make(own)
        found = own.stat()
    except OSError as e:
        raise ConfigError(
            f"segment_parallel: the secret of this machine's routers and engines cannot be kept in {own}: "
            f"{e.strerror}; set secret_file (routers: --secret-file), or make the folder writable"
        ) from e
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"segment_parallel: {own} belongs to user {found.st_uid}, mode {found.st_mode & 0o777:o}: "
            f"expected user {os.geteuid()} and mode 600; delete the file, then restart routers and engines"
        )
    return _of_file(str(own))


def _make(path: Path) -> None:
    """Create a secret in ``path`` atomically; the first of several processes wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_LEAST_BYTES))
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _of_file(path: str) -> bytes:
    where = f"hypic config: segment_parallel.secret_file={path!r}"
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MOST_BYTES + 1).strip()
    except OSError as e:
        raise ConfigError(
            f"{where}: cannot be read: {e.strerror}; expected a file of at least {_LEAST_BYTES} bytes"
        ) from e
    try:
        _check_length(found)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e
    return found


def _check_length(secret: bytes) -> None:
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigError(
            f"segment_parallel: a secret of {len(secret)} bytes: expected {_LEAST_BYTES} to {_MOST_BYTES}, "
            "for example the output of `openssl rand -hex 32`"
        )


def _answer(asked: zmq.Socket[Any], admitted: bytes) -> None:
    """Admit only clients with the public key ``admitted``, until the context is terminated."""
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
    """Return the public and the private key in Z85, as libzmq expects; each ``person`` has other keys."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=person).digest())
    return zmq.curve_public(private), private
