"""Receiver notifier: a router's messages to a receiver about records that the receiver expects.

``withdraw`` says that no sender will send the records; ``tell_stored`` says that a shared tier has them.
Both functions block: asyncio code calls them in a thread (``to_thread``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import zmq

from . import wire
from .loop import send
from .secret import Secret
from .sockets import dealer, destination_of


def withdraw(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """Tell the receiver at ``destination`` that no sender will send ``names``; return once it has answered.

    Raises ``ValueError`` for a malformed name, and for a destination that is malformed or not allowed;
    ``TimeoutError`` when the receiver does not answer within ``timeout_s`` seconds;
    ``ConnectionRefusedError`` when the receiver has another namespace or version.
    """
    _tell(wire.Withdraw, destination, namespace, names, secret, timeout_s)


def tell_stored(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """Tell the receiver at ``destination`` that ``names`` are in a tier that its instance shares.

    Waiting and errors: see :func:`withdraw`."""
    _tell(wire.Stored, destination, namespace, names, secret, timeout_s)


def _tell(
    what: type[wire.Withdraw | wire.Stored],
    destination: str,
    namespace: str,
    names: Sequence[str],
    secret: Secret | None,
    timeout_s: float,
) -> None:
    address = destination_of(destination, secret)
    names = [wire.check_name(name) for name in names]
    batches = [what(names[i : i + wire.MOST_NAMES]) for i in range(0, len(names), wire.MOST_NAMES)]
    if not batches:
        return
    until = time.monotonic() + timeout_s
    hello = wire.Hello(wire.VERSION, namespace, secrets.token_hex(16))
    codec, unanswered = wire.Codec(), len(batches)
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = dealer(context, address, secret)
        while unanswered > 0:
            left = until - time.monotonic()
            if left <= 0 or not socket.poll(max(1, int(1000 * left))):
                raise TimeoutError(f"{address.url} did not take the message within {timeout_s:.3g} s")
            try:
                reply = codec.reply(b"".join(socket.recv_multipart(zmq.NOBLOCK)))
            except (zmq.Again, wire.Malformed):
                continue
            match reply:  # a lost message is sent again: every new connection begins with Again
                case wire.Again():
                    send(socket, codec.encode(hello))
                case wire.Welcome():
                    unanswered = len(batches)
                    for batch in batches:
                        send(socket, codec.encode(batch))
                case wire.Withdrawn() | wire.Noted():
                    unanswered -= 1
                case wire.Unwelcome():
                    raise ConnectionRefusedError(f"rejected by {address.url}: {reply.reason}")
    finally:
        context.destroy(linger=0)
