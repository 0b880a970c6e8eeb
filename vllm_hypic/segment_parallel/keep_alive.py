"""Finding connections whose other end is gone without a word.

TCP answers while a process stands still.  ZeroMQ's own heartbeats do not, and may abort a process that stood
still for longer than they last with its queue full (libzmq #3937).
"""

from __future__ import annotations

from typing import Any

import zmq

_PROBES = 3


def keep_alive(socket: zmq.Socket[Any], *, idle_s: int, probe_s: int) -> None:
    """Drop a connection that was silent for ``idle_s`` and answers none of three probes ``probe_s`` apart."""
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _PROBES)
