"""What a landing is told of records that it expects, by who sends none: the router.

``withdraw``: nobody will send them.  ``tell_stored``: they are in a shared tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

import zmq

from . import wire
from .dealer import dealer, destination_of
from .secret import Secret


def withdraw(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """Tell the landing at ``destination`` that nobody will send ``names``.  Returns when it knows.

    ``ValueError`` names a malformed name, and a destination that is malformed or not allowed;
    ``TimeoutError``: it has not answered ``timeout_s`` seconds from now; ``ConnectionRefusedError``: it has
    another namespace or version.
    """
    _tell(wire.Withdraw, destination, namespace, names, secret, timeout_s)


def tell_stored(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """Tell the landing at ``destination`` that ``names`` are in a tier that its instance shares.  Otherwise
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
    batches = [
        what([wire.check_name(name) for name in names[i : i + wire.MOST_NAMES]])
        for i in range(0, len(names), wire.MOST_NAMES)
    ]
    if not batches:
        return
    until = time.monotonic() + timeout_s
    codec, sender, answered = wire.Codec(), secrets.token_hex(16), 0
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = dealer(context, address, secret)
        while answered < len(batches):
            left = until - time.monotonic()
            if left <= 0 or not socket.poll(max(1, int(1000 * left))):
                raise TimeoutError(f"{address.url} did not take the message within {timeout_s:.3g} s")
            try:
                reply = codec.reply(b"".join(socket.recv_multipart(zmq.NOBLOCK)))
            except (zmq.Again, wire.Malformed):
                continue
            if isinstance(reply, wire.Unwelcome):
                raise ConnectionRefusedError(f"turned away by {address.url}: {reply.reason}")
            with contextlib.suppress(zmq.Again):  # disconnected: the next connection begins with Again
                if isinstance(reply, wire.Again):
                    socket.send(codec.encode(wire.Hello(wire.VERSION, namespace, sender)), zmq.NOBLOCK)
                elif isinstance(reply, wire.Welcome):
                    answered = 0
                    for batch in batches:
                        socket.send(codec.encode(batch), zmq.NOBLOCK)
                elif isinstance(reply, wire.Withdrawn | wire.Noted):
                    answered += 1
    finally:
        context.destroy(linger=0)


async def awithdraw(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """:func:`withdraw` on a thread."""
    await asyncio.to_thread(withdraw, destination, namespace, names, secret, timeout_s)


async def atell_stored(
    destination: str, namespace: str, names: Sequence[str], secret: Secret | None, timeout_s: float = 2.0
) -> None:
    """:func:`tell_stored` on a thread."""
    await asyncio.to_thread(tell_stored, destination, namespace, names, secret, timeout_s)
