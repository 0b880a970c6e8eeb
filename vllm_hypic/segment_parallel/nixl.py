"""NIXL (UCX), a transport: a sender copies a record's bytes into its memory, and a receiver reads them there.

Both sides register one piece of memory at the start and keep it until the end.  Each record's message carries
only an address in that memory.  The fixed memory costs the sender a copy, and makes a late reader harmless.
Over TCP, UCX lets the process that is read look up any requested address.  A reader could therefore still
read a record whose memory is no longer registered, and would crash the sender if the memory were unmapped.

This module starts no thread, because NIXL's own progress thread would keep a core busy.  Transfers make
progress only while their owners call ``poll`` or ``progress``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..config.segment_parallel import SegmentParallelConfig
from ..errors import ConfigError
from ..store.record import ALIGNMENT, aligned_buffer
from . import wire
from .complaints import Complaints, logger
from .transport import Arrival, Handover, Inbound, Outbound, Route, TransportError

INSTALL: Final = "pip install nixl==1.5.1"
"""Command that installs NIXL.  Without CUDA: ``pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1``."""
MOST_SOURCES: Final = 256
"""Limit on senders that a receiver is connected to; the least recently read idle sender makes room."""
LATE_S, LATE_BYTES_PER_S = 5.0, 10e6
"""A receiver gives a pull up after ``LATE_S + nbytes / LATE_BYTES_PER_S`` seconds."""

_DEVICES = "UCX_NET_DEVICES"
_DONE, _UNDER_WAY = "DONE", "PROC"


class SpanAllocator:
    """Allocate spans of ``0..nbytes``, aligned to :data:`~vllm_hypic.store.record.ALIGNMENT`, first fit.

    Meant for a few dozen spans at a time; only one thread may use an instance."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: dict[int, int] = {}
        """End of each span by its start, in ascending order."""

    def __len__(self) -> int:
        """Return the number of spans that are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Take a span of ``nbytes`` (at least 1) and return its start; ``None``: no gap is long enough."""
        start = 0
        for taken, end in self._taken.items():
            if start + nbytes <= taken:
                break
            start = -(-end // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._nbytes:
            return None
        self._taken = dict(sorted([*self._taken.items(), (start, start + nbytes)]))
        return start

    def give_back(self, start: int) -> None:
        del self._taken[start]


class _Agent:
    """A NIXL agent with one registered piece of memory.  Only one thread at a time may use an agent."""

    def __init__(self, nbytes: int, loopback: bool) -> None:
        api, self.errors = _nixl()
        self._complaints = Complaints()
        self.memory = aligned_buffer(nbytes)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        try:
            with _devices("lo" if loopback else None):
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self.nixl = api.nixl_agent(secrets.token_hex(16), config)
            self.nixl.register_memory([(self.address, nbytes, 0, "")], "DRAM", ["UCX"])
            self.metadata: bytes = self.nixl.get_agent_metadata()
        except self.errors as e:
            raise ConfigError(
                "hypic config: segment_parallel.transport='nixl': NIXL cannot use UCX here with "
                f"{_DEVICES}={os.environ.get(_DEVICES, '')!r}: {e}; expected devices of this machine, or "
                "transport 'tcp'"
            ) from e
        if len(self.metadata) > wire.METADATA_BYTES:
            raise ConfigError(
                f"hypic config: segment_parallel.transport='nixl': {len(self.metadata)} bytes of NIXL "
                f"metadata, expected at most {wire.METADATA_BYTES}: name fewer devices in {_DEVICES}"
            )

    def progress(self) -> None:
        try:
            self.nixl.get_new_notifs()
        except self.errors as e:
            self._complaints.warn("progress", "NIXL cannot read its notifications: %s", e)

    def close(self) -> None:
        """Delete the agent.  Its memory must outlive the agent, which writes there and serves readers."""
        del self.nixl


class Exporter(Outbound):
    """The sender's half: copies records into ``nbytes`` of memory, where receivers read them.

    Any thread may create an exporter; afterwards only the sender's thread may use it.
    """

    route = Route.NIXL

    def __init__(self, nbytes: int, *, loopback: bool) -> None:
        """Open an agent.  ``loopback``: use only the loopback device, unless ``UCX_NET_DEVICES`` is set.

        Raises :class:`ConfigError` when NIXL is not installed, or finds no device."""
        self._agent = _Agent(nbytes, loopback)
        self._spans = SpanAllocator(nbytes)

    @property
    def busy(self) -> bool:
        return len(self._spans) > 0

    def hand_over(self, name: str, data: memoryview) -> Handover | None:
        start = self._spans.take(data.nbytes)
        if start is None:
            return None
        # NumPy releases the GIL while it copies; a memoryview's copy does not.
        target = np.frombuffer(self._agent.memory, np.uint8, data.nbytes, start)
        np.copyto(target, np.frombuffer(data, np.uint8))
        return Handover(wire.Held(name, self._agent.address + start, self._agent.metadata))

    def release(self, handover: Handover) -> None:
        """Free the record's memory.  A late reader gets bytes that fail the check of the record's digest."""
        assert isinstance(handover.message, wire.Held)
        self._spans.give_back(handover.message.address - self._agent.address)

    def progress(self) -> None:
        self._agent.progress()

    def close(self) -> None:
        self._agent.close()


@dataclass(eq=False, kw_only=True)
class Pull(Arrival):
    """A read of a record's bytes from a sender's memory into the puller's memory."""

    start: int
    source: _Source
    handle: Any
    deadline: float


@dataclass(eq=False)
class _Source:
    """A sender's NIXL agent, from which the puller reads."""

    name: str
    metadata: bytes
    pulls: set[Pull] = field(default_factory=set)
    """Pulls that have not ended; includes pulls given up whose memory NIXL may still write."""
    faulty: bool = False
    """True after a failed pull: the puller reconnects once all pulls from this source have ended."""


class Puller(Inbound):
    """The receiver's half: reads records into ``nbytes`` of memory.

    Any thread may create a puller; afterwards only the receiver's thread may use it.
    """

    route = Route.NIXL

    def __init__(self, nbytes: int, *, loopback: bool, late_s: float = LATE_S) -> None:
        """Open an agent.  ``loopback``, errors: see :class:`Exporter`.  ``late_s``: see :data:`LATE_S`."""
        self._agent = _Agent(nbytes, loopback)
        self._spans = SpanAllocator(nbytes)
        self._late_s = late_s
        self._sources: OrderedDict[bytes, _Source] = OrderedDict()
        """Sources by their metadata, the least recently read source first."""
        self._under_way: list[Pull] = []
        self._given_up: list[Pull] = []
        """Pulls past their deadline.  NIXL may still write their memory: it is reused only after they end."""

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def start(self, message: wire.Data | wire.Held, payload: memoryview, nbytes: int) -> Pull:
        assert isinstance(message, wire.Held)
        source = self._source(message.metadata)
        start = self._spans.take(nbytes)
        if start is None:
            raise TransportError(f"the receive buffer (nixl_bytes) has no room for {nbytes} bytes")
        nixl, here = self._agent.nixl, self._agent.address + start
        try:
            spans = [nixl.get_xfer_descs([(at, nbytes, 0)], "DRAM") for at in (here, message.address)]
            handle = nixl.initialize_xfer("READ", *spans, source.name)
            nixl.transfer(handle)  # poll finds the outcome
        except self._agent.errors as e:
            self._spans.give_back(start)
            source.faulty = True
            raise TransportError(f"NIXL cannot read from the sender: {e}") from e
        deadline = time.monotonic() + self._late_s + nbytes / LATE_BYTES_PER_S
        data = self._agent.memory[start : start + nbytes]
        pull = Pull(data, start=start, source=source, handle=handle, deadline=deadline)
        source.pulls.add(pull)
        self._under_way.append(pull)
        return pull

    def poll(self) -> Sequence[Pull]:
        self._given_up = [pull for pull in self._given_up if not self._worked_off(pull)]
        if not self._under_way:
            self._agent.progress()
            return []
        ended, now = [], time.monotonic()
        for pull in list(self._under_way):
            if (fault := self._fault(pull)) is None:
                if now < pull.deadline:
                    continue
                fault = "the transfer took too long"
                self._given_up.append(pull)
                pull.source.faulty = True
            elif fault:
                self._spans.give_back(pull.start)
            pull.over, pull.fault = True, fault
            self._under_way.remove(pull)
            ended.append(pull)
        return ended

    def release(self, arrival: Arrival) -> None:
        assert isinstance(arrival, Pull)
        self._spans.give_back(arrival.start)

    def close(self) -> None:
        for pull in (*self._under_way, *self._given_up):
            self._let_go(pull)
            pull.handle = None
        self._under_way, self._given_up = [], []
        for source in self._sources.values():
            self._disconnect(source)
        self._sources.clear()
        self._agent.close()

    def _worked_off(self, pull: Pull) -> bool:
        if self._fault(pull) is None:
            return False
        self._spans.give_back(pull.start)
        return True

    def _fault(self, pull: Pull) -> str | None:
        """Return why the pull failed, empty after a success; ``None`` while NIXL still reads.

        An ended pull is released and removed from its source."""
        try:
            state = self._agent.nixl.check_xfer_state(pull.handle)
            if state == _UNDER_WAY:
                return None
            fault = "" if state == _DONE else "the transfer failed"
        except self._agent.errors as e:
            fault = f"the transfer failed: {e}"
        self._let_go(pull)
        pull.source.pulls.discard(pull)
        pull.source.faulty |= bool(fault)
        return fault

    def _let_go(self, pull: Pull) -> None:
        with contextlib.suppress(*self._agent.errors):
            self._agent.nixl.release_xfer_handle(pull.handle)

    def _source(self, metadata: bytes) -> _Source:
        source = self._sources.get(metadata)
        if source is not None and source.faulty:
            if source.pulls:
                raise TransportError("an earlier transfer from this sender hangs")
            del self._sources[metadata]
            self._disconnect(source)
            source = None
        if source is None:
            self._make_room_for_source()
            try:
                name = self._agent.nixl.add_remote_agent(metadata).decode(errors="replace")
            except self._agent.errors as e:
                raise TransportError(f"NIXL refuses the sender's metadata: {e}") from e
            if any(other.name == name for other in self._sources.values()):
                raise TransportError("another sender has the same NIXL name")
            source = self._sources[metadata] = _Source(name, metadata)
        self._sources.move_to_end(metadata)
        return source

    def _make_room_for_source(self) -> None:
        if len(self._sources) < MOST_SOURCES:
            return
        idle = next((s for s in self._sources.values() if not s.pulls), None)
        if idle is None:
            raise TransportError(f"the receiver already reads from {MOST_SOURCES} senders, the most allowed")
        del self._sources[idle.metadata]
        self._disconnect(idle)

    def _disconnect(self, source: _Source) -> None:
        with contextlib.suppress(*self._agent.errors):
            self._agent.nixl.remove_remote_agent(source.name)


def open_nixl(config: SegmentParallelConfig) -> tuple[Exporter, Puller]:
    """Return both halves for an instance.  Raises :class:`ConfigError` when NIXL does not work here."""
    loopback = config.secret_file is None
    if not loopback and _DEVICES not in os.environ:
        logger.warning(
            "NIXL: UCX neither encrypts nor authenticates, and listens on all interfaces. Any host that can "
            "connect can read and write this process's memory. Set %s to the devices of a private network",
            _DEVICES,
        )
    nbytes = config.nixl_bytes
    return Exporter(nbytes, loopback=loopback), Puller(nbytes, loopback=loopback)


@contextlib.contextmanager
def _devices(default: str | None) -> Iterator[None]:
    """Set UCX's devices to ``default`` unless the environment names devices: UCX offers no other setting."""
    if default is None or _DEVICES in os.environ:
        yield
        return
    os.environ[_DEVICES] = default
    try:
        yield
    finally:
        del os.environ[_DEVICES]


def _nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return NIXL's module, and the exceptions that its calls raise, which have no common base class.

    Raises :class:`ConfigError` when NIXL cannot be imported."""
    import logging

    try:
        from nixl import _api, _bindings
    except ImportError as e:
        raise ConfigError(
            f"hypic config: segment_parallel.transport='nixl': NIXL cannot be imported ({e}): run "
            f"`{INSTALL}`, or set transport 'tcp'"
        ) from e
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else NIXL reports to stdout
    errors = tuple(e for e in vars(_bindings).values() if isinstance(e, type) and issubclass(e, Exception))
    return _api, (*errors, KeyError, RuntimeError)  # a NIXL without UCX raises the last two
