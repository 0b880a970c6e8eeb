"""Events: every instance publishes the changes of its records, and routers keep a view of each instance.

A subscriber asks for a snapshot when it joins, misses a message or finds another engine process at the
address.  The subscriber then applies the changes that follow the snapshot.  No side waits for the other:
the publisher drops messages that a subscriber has no room for, and gaps in their numbers reveal the loss.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from ..config.segment_parallel import Address
from ..errors import ConfigError
from .events_wire import (
    ALL,
    HEARTBEAT_S,
    MOST_BYTES,
    MOST_NAMES,
    Changes,
    Heartbeat,
    Message,
    Presence,
    Snapshot,
    asked_snapshot,
    batches,
    decode,
    encode,
    new_snapshot_topic,
)
from .sockets import keep_alive

if TYPE_CHECKING:
    from .secret import Secret

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 512
"""Limit on messages that wait for one subscriber, or inside a subscriber; further messages are dropped."""
SILENCE_S = 2.0
"""Seconds after which a view that no message confirms counts as unknown."""
_ASK_AGAIN_S = 0.5
_SNAPSHOT_SHARE = 0.1
"""Limit on the share of the publisher's time that snapshots take, independent of the number of requests."""
_MOST_ASKED = 1024
"""Limit on subscribers whose snapshots wait; further subscribers must ask again."""
_CLOSE_S = 5.0


class Publisher:
    """Publish one engine process's records and load, on a separate thread.

    Memory: one entry per name, and :data:`QUEUED_MESSAGES` messages per subscriber.
    """

    def __init__(self, bind: str, secret: Secret | None) -> None:
        """Listen on ``bind`` (``tcp://ADDRESS:PORT``); raise :class:`ConfigError` when that is impossible."""
        self.boot = secrets.token_hex(8)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.XPUB)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards the values that `change` leaves for the thread
        self._changed: dict[str, Presence] = {}
        self._load = 0
        self._awake = False
        self._closing = False
        # Only the publisher's thread uses the attributes below.
        self._states: dict[str, Presence] = {}
        self._told_load = 0
        self._seq = 0
        self._asked: set[bytes] = set()
        self._snapshots_rest_until = 0.0
        try:
            if secret is not None:
                secret.serve(self._socket)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
            self._socket.set(zmq.MAXMSGSIZE, 1024)  # subscribers send topics only
            self._socket.set(zmq.IPV6, Address.parse(bind).ipv6)
            self._socket.bind(bind)
        except (ValueError, zmq.ZMQError) as e:
            self._free()
            raise ConfigError(
                f"hypic config: segment_parallel.events={bind!r}: cannot be bound ({e}); "
                "expected tcp://ADDRESS:PORT with an address of this machine and a free port"
            ) from e
        self._thread = threading.Thread(target=self._run, name="hypic events", daemon=True)
        self._thread.start()

    def change(
        self, resident: Sequence[str], pending: Sequence[str], gone: Sequence[str], load_tokens: int
    ) -> None:
        """Publish a change of record states and load.  Never blocks.

        ``resident``: names of records in the pool; ``pending``: names being computed or fetched; ``gone``:
        names of neither.  ``load_tokens``: prompt tokens still to prefill.
        """
        with self._lock:
            for state, names in (
                (Presence.RESIDENT, resident),
                (Presence.PENDING, pending),
                (Presence.GONE, gone),
            ):
                for name in names:
                    self._changed[name] = state
            self._load = load_tokens
            if self._awake or self._closing:
                return
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def restart(self) -> None:
        """Change the boot id, so that subscribers see a new process and ask for snapshots.  Never blocks."""
        self.boot = secrets.token_hex(8)

    def close(self) -> None:
        """Stop publishing; unsent messages are lost.  A second call changes nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # the thread still uses the socket: a leak is safer than a close
            log.error("the thread that publishes events did not end within %g s", _CLOSE_S)
            return
        self._free()

    def _free(self) -> None:
        self._socket.close(0)
        self._context.destroy(0)
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_at = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            until = beat_at
            if self._asked:
                until = min(until, self._snapshots_rest_until)
            ready = dict(poller.poll(math.ceil(max(0.0, until - now) * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._publish_changes()
            if self._socket in ready:
                self._hear()
            now = time.monotonic()
            if self._asked and now >= self._snapshots_rest_until:
                self._publish_snapshots()
            if now >= beat_at:
                self._publish(Heartbeat(self.boot, self._seq, self._told_load))
                beat_at = now + HEARTBEAT_S

    def _publish_changes(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, {}
            load, self._awake = self._load, False
        if not changed and load != self._told_load:
            self._publish(Heartbeat(self.boot, self._seq, load))
        self._told_load = load
        for batch in batches(changed):
            self._seq += 1
            self._publish(Changes(self.boot, self._seq, batch.resident, batch.pending, batch.gone, load))
        for name, state in changed.items():
            if state is Presence.GONE:
                self._states.pop(name, None)
            else:
                self._states[name] = state

    def _hear(self) -> None:
        for _ in range(_MOST_ASKED):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            topic = asked_snapshot(frame)
            if topic is not None and len(self._asked) < _MOST_ASKED:
                self._asked.add(topic)

    def _publish_snapshots(self) -> None:
        begin = time.monotonic()
        found = list(batches(self._states))
        for part in range(max(1, len(found))):
            resident, pending = (found[part].resident, found[part].pending) if found else ([], [])
            body = encode(
                Snapshot(self.boot, self._seq, part, max(1, len(found)), resident, pending, self._told_load)
            )
            for topic in self._asked:
                self._send(topic, body)
        self._asked.clear()
        end = time.monotonic()
        self._snapshots_rest_until = end + (end - begin) / _SNAPSHOT_SHARE

    def _publish(self, message: Message) -> None:
        self._send(ALL, encode(message))

    def _send(self, topic: bytes, body: bytes) -> None:
        # An XPUB socket never waits: it drops messages that a subscriber has no room for.
        with suppress(zmq.Again):
            self._socket.send_multipart([topic, body], zmq.NOBLOCK)


class InstanceView:
    """A router's view of one instance's records and load.  Only the subscription changes a view."""

    def __init__(self) -> None:
        self.resident: set[str] = set()
        self.pending: set[str] = set()
        self.load_tokens = 0
        self.boot = ""
        self._right_at: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since a message last confirmed the view; infinite before the first snapshot."""
        return float("inf") if self._right_at is None else time.monotonic() - self._right_at

    @property
    def known(self) -> bool:
        """Whether a message confirmed the view recently enough to trust its records and load."""
        return self.age_s < SILENCE_S

    def _replace(self, boot: str, resident: set[str], pending: set[str]) -> None:
        self.boot, self.resident, self.pending = boot, resident, pending

    def _forget(self, boot: str) -> None:
        self._replace(boot, set(), set())
        self.load_tokens = 0
        self._right_at = None

    def _apply(self, changes: Changes) -> None:
        self.resident.update(changes.resident)
        self.resident.difference_update(changes.pending, changes.gone)
        self.pending.update(changes.pending)
        self.pending.difference_update(changes.resident, changes.gone)

    def _now_right(self, message: Message) -> None:
        self.load_tokens = message.load_tokens
        self._right_at = time.monotonic()


class Subscription:
    """Keep :attr:`view` of the instance that publishes at ``url``; the instance may start later."""

    def __init__(self, url: str, secret: Secret | None, on_change: Callable[[], None] = lambda: None) -> None:
        """Prepare a subscription; :meth:`run` calls ``on_change`` after each change of names in the view.

        Raises :class:`ConfigError` unless ``url`` is ``tcp://ADDRESS:PORT``.
        """
        self.url = url
        self.view = InstanceView()
        self.ignored = 0
        """Number of messages that were malformed, or meant for another subscriber."""
        self.snapshots = 0
        """Number of snapshots applied to the view."""
        self._secret, self._on_change = secret, on_change
        self._seq: int | None = None  # number of the last change applied; None: a snapshot is needed
        self._topic = b""
        self._asked_at = 0.0
        self._parts: list[Snapshot] = []
        try:
            self._ipv6 = Address.parse(url).ipv6
        except ValueError as e:
            raise ConfigError(f"address of an instance's events: {e}") from e

    def _connect(self, socket: zmq.asyncio.Socket) -> None:
        if self._secret is not None:
            self._secret.connect(socket)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MOST_BYTES)
        socket.set(zmq.IPV6, self._ipv6)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.HANDSHAKE_IVL, 3000)
        keep_alive(socket, idle_s=2, probe_s=1)
        socket.connect(self.url)

    async def run(self) -> None:
        """Keep the view up to date until cancelled.  Afterwards the view ages until it counts as unknown."""
        # All subscriptions share one context, and thus one I/O thread.
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
            self._connect(socket)
            # Subscribe before the snapshot request, so that no change after the snapshot is missed.
            socket.subscribe(ALL)
            self._seq = None
            self._ask(socket)
            while True:
                if self._seq is None and time.monotonic() - self._asked_at > _ASK_AGAIN_S:
                    self._ask(socket)
                try:
                    async with asyncio.timeout(_ASK_AGAIN_S):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    continue
                message = decode(frames, self._topic)
                if message is None:
                    self.ignored += 1
                else:
                    self._hear(message)
                # recv returns at once while messages wait: without this, a flood would block the event loop.
                await asyncio.sleep(0)

    def _ask(self, socket: zmq.Socket) -> None:
        if self._topic:
            socket.unsubscribe(self._topic)
        self._topic = new_snapshot_topic()
        socket.subscribe(self._topic)
        self._asked_at = time.monotonic()
        self._parts = []

    def _hear(self, message: Message) -> None:
        if isinstance(message, Snapshot):
            self._collect(message)
            return
        self._parts = []  # a snapshot's parts arrive in a row: another message makes them incomplete
        view = self.view
        if message.boot != view.boot:
            view._forget(message.boot)
            self._seq = None
        if self._seq is None:
            return
        step = 1 if isinstance(message, Changes) else 0
        if message.seq < self._seq + step:
            return  # the snapshot already contains this change
        if message.seq > self._seq + step:
            self._seq = None  # a change was missed; the old view serves until a snapshot or its age ends it
            return
        if isinstance(message, Changes):
            view._apply(message)
            self._seq = message.seq
            if len(view.resident) + len(view.pending) > MOST_NAMES:
                log.error("the router ignores %s, which publishes more than %d names", self.url, MOST_NAMES)
                view._forget(message.boot)
                self._seq = None
                return
            self._on_change()
        view._now_right(message)

    def _collect(self, part: Snapshot) -> None:
        if part.part == 0:
            self._parts = []
        first = self._parts[0] if self._parts else part
        if (part.boot, part.seq, part.parts, part.part) != (
            first.boot,
            first.seq,
            first.parts,
            len(self._parts),
        ):
            self._parts = []
            self._seq = None
            return
        self._parts.append(part)
        if len(self._parts) < part.parts:
            return
        parts, self._parts = self._parts, []
        resident = {name for p in parts for name in p.resident}
        pending = {name for p in parts for name in p.pending} - resident
        self.view._replace(part.boot, resident, pending)
        self.view._now_right(part)
        self._seq = part.seq
        self._on_change()
        self.snapshots += 1
