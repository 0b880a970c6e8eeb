"""The two sockets of the protocol: a receiver listens on ``router``; senders and routers use ``dealer``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from ..config.segment_parallel import Address
from . import wire
from .secret import Secret

_UNREAD_MESSAGES = 16
"""Unread messages after which libzmq stops reading a connection, so that no peer fills our memory."""
_PROBES = 3


def router(
    context: zmq.Context[Any], address: Address, secret: Secret | None, max_nbytes: int
) -> zmq.Socket[Any]:
    """Return a socket bound to ``address`` for frames up to ``max_nbytes``.  Raises :class:`zmq.ZMQError`."""
    with _socket(context, zmq.ROUTER, address) as socket:
        socket.maxmsgsize = max(max_nbytes, wire.HEADER_BYTES)
        socket.rcvhwm = _UNREAD_MESSAGES
        socket.backlog = 1024  # many workers may connect at once after a restart
        socket.router_mandatory = True  # so that a send to a peer that is gone fails
        if secret is not None:
            secret.serve(socket)
        socket.bind(address.url)
    return socket


def dealer(context: zmq.Context[Any], address: Address, secret: Secret | None) -> zmq.Socket[Any]:
    """Return a socket that connects to ``address``, again after each loss.  Raises :class:`zmq.ZMQError`."""
    with _socket(context, zmq.DEALER, address) as socket:
        socket.maxmsgsize = wire.HEADER_BYTES
        socket.sndhwm = 0  # no limit: the sender owns the queued bytes, and libzmq does not copy them
        # Without a connection nothing is queued, and no queued message outlives its connection.  Each
        # connection begins with an empty message, which the receiver answers with Again.
        socket.immediate = True
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1000
        socket.connect_timeout = 5000
        if secret is not None:
            secret.connect(socket)
        socket.connect(address.url)
    return socket


@contextlib.contextmanager
def _socket(context: zmq.Context[Any], kind: int, address: Address) -> Iterator[zmq.Socket[Any]]:
    """Yield a new socket, and close it if its set-up in the ``with`` block raises :class:`zmq.ZMQError`."""
    socket = context.socket(kind)
    try:
        socket.linger = 0
        socket.ipv6 = address.ipv6
        keep_alive(socket, idle_s=30, probe_s=10)
        yield socket
    except zmq.ZMQError:
        socket.close()
        raise


def keep_alive(socket: zmq.Socket[Any], *, idle_s: int, probe_s: int) -> None:
    """Drop connections that are silent for ``idle_s`` and answer none of three probes ``probe_s`` apart.

    TCP answers probes even while a process is paused, but not ZeroMQ's heartbeats.  Heartbeats may also abort
    a process that was paused, with a full queue, for longer than their time-out (libzmq #3937).
    """
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _PROBES)


def destination_of(destination: str, secret: Secret | None) -> Address:
    """Return the receiver's address.  Raises ``ValueError`` for a malformed or wildcard address, and without
    a ``secret`` for any but a loopback address."""
    try:
        address = Address.parse(destination)
    except ValueError as e:
        raise ValueError(f"destination {e}") from e
    if address.wildcard:
        raise ValueError(f"destination {destination!r}: expected one machine's address")
    if secret is None and not address.loopback:
        raise ValueError(
            f"destination {destination!r}: expected a loopback address (tcp://127.0.0.1:PORT), or an "
            "instance with a secret (segment_parallel.secret_file)"
        )
    return address
