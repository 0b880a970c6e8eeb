"""The two sockets of the protocol: the one a receiver listens on, and the one others talk to it by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from ..config.segment_parallel import Address
from . import wire
from .secret import Secret

_UNREAD_MESSAGES = 16
"""Per connection of a receiver: libzmq then stops reading it, so that a peer cannot fill our memory."""
_PROBES = 3


def router(
    context: zmq.Context[Any], address: Address, secret: Secret | None, max_nbytes: int
) -> zmq.Socket[Any]:
    """A socket bound to ``address``, that takes frames of ``max_nbytes``.  Raises :class:`zmq.ZMQError`."""
    with _socket(context, zmq.ROUTER, address) as socket:
        socket.maxmsgsize = max(max_nbytes, wire.HEADER_BYTES)
        socket.rcvhwm = _UNREAD_MESSAGES
        socket.backlog = 1024  # many workers may connect at once after a restart
        socket.router_mandatory = True  # so that one learns that a peer has gone
        if secret is not None:
            secret.serve(socket)
        socket.bind(address.url)
    return socket


def dealer(context: zmq.Context[Any], address: Address, secret: Secret | None) -> zmq.Socket[Any]:
    """A socket that connects until it is closed.  Raises :class:`zmq.ZMQError`."""
    with _socket(context, zmq.DEALER, address) as socket:
        socket.maxmsgsize = wire.HEADER_BYTES
        socket.sndhwm = 0  # what is queued is ours, and not copied
        # Nothing is queued for a connection that is not there, and nothing outlives one: each begins with an
        # empty message, which the other side answers with Again.
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
    """A socket to be set up, which is closed if that fails."""
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
    """Drop a connection that was silent for ``idle_s`` and answers none of three probes ``probe_s`` apart.

    TCP answers while a process stands still.  ZeroMQ's own heartbeats do not, and may abort a process that
    stood still for longer than they last with its queue full (libzmq #3937).
    """
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _PROBES)


def destination_of(destination: str, secret: Secret | None) -> Address:
    """The receiver's address.  ``ValueError``: it is malformed, or not allowed (without a ``secret`` only
    loopback addresses are)."""
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
