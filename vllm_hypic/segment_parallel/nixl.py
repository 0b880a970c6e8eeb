"""NIXL (UCX), a transport: a sender lays a record's bytes out, a receiver reads them from there.

Both sides register one piece of memory when they start, and keep it until the end: what travels between them
with each record is only an address in it.  That costs the sender a copy, and is what makes a late reader
harmless.  Over TCP, UCX lets the process that is read from look up any address it is asked for: registered
no more, a record could still be read; unmapped, the sender would die of it.

Nothing here has a thread: NIXL's own one would keep a core busy.  Transfers make progress while their owners
ask for it.
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
"""On a machine without CUDA: ``pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1``."""
MOST_SOURCES: Final = 256
"""Senders that a receiver is connected to; the one least recently read from makes room."""
LATE_S, LATE_BYTES_PER_S = 5.0, 10e6
"""A pull that takes longer than ``LATE_S + nbytes / LATE_BYTES_PER_S`` is given up."""

_DEVICES = "UCX_NET_DEVICES"
_DONE, _UNDER_WAY = "DONE", "PROC"


class SpanAllocator:
    """Spans of ``0..nbytes``, each aligned to :data:`~vllm_hypic.store.record.ALIGNMENT`: the first gap that
    is long enough is taken.  For a few dozen spans at a time, and one thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: dict[int, int] = {}
        """End of each span by its start, in order."""

    def __len__(self) -> int:
        """Spans that are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Start of a span of ``nbytes`` (at least 1); ``None`` when no gap is long enough."""
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
    """A NIXL agent with one registered piece of memory.  For one thread at a time."""

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
        """The memory outlives the agent, which writes there, and lets others read, until it is gone."""
        del self.nixl


class Exporter(Outbound):
    """The sender's half: copies of records, in ``nbytes`` of memory, for receivers to read.

    Made by any thread, then used by the sender's thread only.
    """

    route = Route.NIXL

    def __init__(self, nbytes: int, *, loopback: bool) -> None:
        """``loopback``: unless ``UCX_NET_DEVICES`` says otherwise, only this machine can connect.
        :class:`ConfigError`: NIXL is not installed, or finds no device."""
        self._agent = _Agent(nbytes, loopback)
        self._spans = SpanAllocator(nbytes)

    @property
    def busy(self) -> bool:
        return len(self._spans) > 0

    def hand_over(self, name: str, data: memoryview) -> Handover | None:
        start = self._spans.take(data.nbytes)
        if start is None:
            return None
        # NumPy's copy lets other threads run; a memoryview's does not.
        target = np.frombuffer(self._agent.memory, np.uint8, data.nbytes, start)
        np.copyto(target, np.frombuffer(data, np.uint8))
        return Handover(wire.Held(name, self._agent.address + start, self._agent.metadata))

    def release(self, handover: Handover) -> None:
        """Whoever still reads it gets bytes that no digest agrees with."""
        assert isinstance(handover.message, wire.Held)
        self._spans.give_back(handover.message.address - self._agent.address)

    def progress(self) -> None:
        self._agent.progress()

    def close(self) -> None:
        self._agent.close()


@dataclass(eq=False, kw_only=True)
class Pull(Arrival):
    """Bytes on their way from a sender's memory into the puller's."""

    start: int
    source: _Source
    handle: Any
    deadline: float


@dataclass(eq=False)
class _Source:
    """An agent that is read from."""

    name: str
    metadata: bytes
    pulls: set[Pull] = field(default_factory=set)
    """Not ended, or given up and perhaps still written."""
    faulty: bool = False
    """A pull failed: it is connected anew once all have ended."""


class Puller(Inbound):
    """The receiver's half: what it reads, into ``nbytes`` of memory.

    Made by any thread, then used by the receiver's thread only.
    """

    route = Route.NIXL

    def __init__(self, nbytes: int, *, loopback: bool, late_s: float = LATE_S) -> None:
        """``loopback``, errors: as of :class:`Exporter`.  ``late_s``: see :data:`LATE_S`."""
        self._agent = _Agent(nbytes, loopback)
        self._spans = SpanAllocator(nbytes)
        self._late_s = late_s
        self._sources: OrderedDict[bytes, _Source] = OrderedDict()
        """Sources by their metadata; the least recently read first."""
        self._under_way: list[Pull] = []
        self._given_up: list[Pull] = []
        """Their memory may still be written: it is not used again before NIXL says that they have ended."""

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
            nixl.transfer(handle)  # what becomes of it is told by poll
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
        """Why the pull failed, empty when it did not; ``None`` while it is under way."""
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
    """Both halves, for an instance.  :class:`ConfigError`: NIXL does not work here."""
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
    """Have UCX use ``default`` unless the environment names devices: it offers no other way to say so."""
    if default is None or _DEVICES in os.environ:
        yield
        return
    os.environ[_DEVICES] = default
    try:
        yield
    finally:
        del os.environ[_DEVICES]


def _nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's module, and the exceptions that its calls raise, which have no base in common."""
    import logging

    try:
        from nixl import _api, _bindings
    except ImportError as e:
        raise ConfigError(
            f"hypic config: segment_parallel.transport='nixl': NIXL cannot be imported ({e}): run "
            f"`{INSTALL}`, or set transport 'tcp'"
        ) from e
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else it reports to stdout
    errors = tuple(e for e in vars(_bindings).values() if isinstance(e, type) and issubclass(e, Exception))
    return _api, (*errors, KeyError, RuntimeError)  # the latter two: of a NIXL without UCX
