"""Receiver notifier: what a receiver is told of records that it expects, by who sends none: the router.

``withdraw``: nobody will send them.  ``tell_stored``: they are in a shared tier.  Both wait: asyncio has
threads for that (``to_thread``).
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
    """Tell the receiver at ``destination`` that nobody will send ``names``.  Returns when it knows.

    ``ValueError`` names a malformed name, and a destination that is malformed or not allowed;
    ``TimeoutError``: it has not answered ``timeout_s`` seconds from now; ``ConnectionRefusedError``: it has
    another namespace or version.
    """
    _tell(wire.Withdraw, destination, namespace, names, secret, timeout_s)


def tell_stored(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """Tell the receiver at ``destination`` that ``names`` are in a tier that its instance shares.  Otherwise
    as :func:`withdraw`."""
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
            match reply:  # what is said in vain is said again: the next connection begins with Again
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
