"""The socket by which senders and routers talk to a landing."""

from __future__ import annotations

from typing import Any

import zmq

from ..config.segment_parallel import Address
from . import wire
from .keep_alive import keep_alive
from .secret import Secret


def destination_of(destination: str, secret: Secret | None) -> Address:
    """The landing's address.  ``ValueError``: it is malformed, or not allowed (without a ``secret`` only
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


def dealer(context: zmq.Context[Any], address: Address, secret: Secret | None) -> zmq.Socket[Any]:
    """A socket that connects until it is closed.  Raises :class:`zmq.ZMQError`."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        socket.ipv6 = address.ipv6
        socket.maxmsgsize = wire.HEADER_BYTES
        socket.sndhwm = 0  # what is queued is ours, and not copied
        # Nothing is queued for a connection that is not there, and nothing outlives one: each begins with an
        # empty message, which the other side answers with Again.
        socket.immediate = True
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1000
        socket.connect_timeout = 5000
        keep_alive(socket, idle_s=30, probe_s=10)
        if secret is not None:
            secret.connect(socket)
        socket.connect(address.url)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
