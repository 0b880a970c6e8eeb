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


class NotifierMachine:
    """The notifier's half of the protocol: says its batches on each connection until all are answered."""

    def __init__(self, hello: wire.Hello, batches: Sequence[wire.Withdraw | wire.Stored]) -> None:
        self._hello, self._batches = hello, batches
        self._unanswered = len(batches)

    @property
    def done(self) -> bool:
        return self._unanswered <= 0

    def handle(self, reply: wire.Reply) -> Sequence[wire.Request]:
        """What to say to this answer.  ``ConnectionRefusedError``: it turns us away."""
        match reply:
            case wire.Again():
                return [self._hello]
            case wire.Welcome():
                self._unanswered = len(self._batches)
                return self._batches
            case wire.Withdrawn() | wire.Noted():
                self._unanswered -= 1
            case wire.Unwelcome():
                raise ConnectionRefusedError(reply.reason)
        return []


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
    until = time.monotonic() + timeout_s
    codec = wire.Codec()
    machine = NotifierMachine(wire.Hello(wire.VERSION, namespace, secrets.token_hex(16)), batches)
    if machine.done:
        return
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = dealer(context, address, secret)
        while not machine.done:
            left = until - time.monotonic()
            if left <= 0 or not socket.poll(max(1, int(1000 * left))):
                raise TimeoutError(f"{address.url} did not take the message within {timeout_s:.3g} s")
            try:
                reply = codec.reply(b"".join(socket.recv_multipart(zmq.NOBLOCK)))
            except (zmq.Again, wire.Malformed):
                continue
            try:
                said = machine.handle(reply)
            except ConnectionRefusedError as e:
                raise ConnectionRefusedError(f"turned away by {address.url}: {e}") from None
            for message in said:
                send(socket, codec.encode(message))  # in vain: the next connection begins with Again
    finally:
        context.destroy(linger=0)
