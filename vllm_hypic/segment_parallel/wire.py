"""What goes over the wire between senders and a receiver: one small header per message, bounded and strict.

A message is one header frame; ``Data`` alone is followed by one frame with the record's bytes.  With NIXL the
bytes take a route of their own: ``Held`` tells a receiver where to read them (``nixl.py``).  Senders
(DEALER) greet first on each connection; a receiver (ROUTER) answers everything from a peer that has not
greeted with ``Again``.  libzmq sends an empty message on each new connection (``ZMQ_PROBE_ROUTER``): so a
receiver says ``Again`` as soon as a sender has connected, and also after either side's restart.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

VERSION: Final = 2
HEADER_BYTES: Final = 65536
"""No header frame is longer."""
MOST_NAMES: Final = 512
"""No :class:`Withdraw` or :class:`Stored` has more names."""
METADATA_BYTES: Final = 16384
"""No NIXL agent's metadata are longer: they are some hundred for each network device."""

_NAME_PATTERN: Final = r"\A[0-9a-f.-]+\Z"
Name = Annotated[str, Meta(min_length=1, max_length=96, pattern=_NAME_PATTERN)]
"""A :data:`~vllm_hypic.store.cache_value.ObjectName`."""
Text = Annotated[str, Meta(max_length=256)]
Size = Annotated[int, Meta(ge=1, le=1 << 48)]


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First on a connection.  Later versions may append fields: a peer is told that its version differs, not
    that it is not understood."""

    version: Annotated[int, Meta(ge=0, le=1 << 31)]
    namespace: Text
    sender: Annotated[str, Meta(min_length=16, max_length=64)]
    """The sender's random id: what an earlier connection of the same sender was promised is void."""


class Offer(Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    name: Name
    nbytes: Size


class Data(Struct, frozen=True, array_like=True, tag="data", forbid_unknown_fields=True):
    """Followed by a frame of exactly the bytes offered."""

    name: Name


class Held(Struct, frozen=True, array_like=True, tag="held", forbid_unknown_fields=True):
    """Instead of ``Data``, after a ``ClearToSend`` that allows it: the bytes offered lie at ``address`` of
    the NIXL agent that ``metadata`` describes, until the answer."""

    name: Name
    address: Annotated[int, Meta(ge=1, le=1 << 62)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=METADATA_BYTES)]


class Retract(Struct, frozen=True, array_like=True, tag="retract", forbid_unknown_fields=True):
    """The sender's offer no longer stands."""

    name: Name


class Withdraw(Struct, frozen=True, array_like=True, tag="withdraw", forbid_unknown_fields=True):
    """A router says: nobody will send these."""

    names: Annotated[list[Name], Meta(max_length=MOST_NAMES)]


class Stored(Struct, frozen=True, array_like=True, tag="stored", forbid_unknown_fields=True):
    """A router says: these are in a tier that the instance shares with who computed them.  Said only to
    instances that describe a shared tier: older ones do not know this message."""

    names: Annotated[list[Name], Meta(max_length=MOST_NAMES)]


class Again(Struct, frozen=True, array_like=True, tag="again", forbid_unknown_fields=True):
    """Greet first, then say again what is still unanswered."""


class Welcome(Struct, frozen=True, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """Answers ``Hello``; a second one means nothing (a receiver finds out so whether a peer is there)."""


class Unwelcome(Struct, frozen=True, array_like=True, tag="unwelcome", forbid_unknown_fields=True):
    """Answers ``Hello``: nothing will be taken from this sender."""

    reason: Text


class ClearToSend(Struct, frozen=True, array_like=True, tag="go", forbid_unknown_fields=True):
    """Send the data."""

    name: Name
    pull: bool = False
    """``Held`` will do."""


class Done(Struct, frozen=True, array_like=True, tag="done", forbid_unknown_fields=True):
    """It is there, or no longer wanted."""

    name: Name


class Ack(Struct, frozen=True, array_like=True, tag="taken", forbid_unknown_fields=True):
    """The record was taken."""

    name: Name


class Nack(Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """The record, or the offer of it, was refused."""

    name: Name
    reason: Text


class Withdrawn(Struct, frozen=True, array_like=True, tag="withdrawn", forbid_unknown_fields=True):
    """Answers ``Withdraw``."""


class Noted(Struct, frozen=True, array_like=True, tag="noted", forbid_unknown_fields=True):
    """Answers ``Stored``."""


Request = Hello | Offer | Data | Held | Retract | Withdraw | Stored
"""Messages of senders and routers to a receiver."""
Reply = Again | Welcome | Unwelcome | ClearToSend | Done | Ack | Nack | Withdrawn | Noted
"""Answers of a receiver."""


class Malformed(Exception):
    """A header that nobody who keeps to the protocol sends."""


T = TypeVar("T")


class Codec:
    """Encodes and decodes headers.  For one thread: msgspec's encoders are not shared."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(Request)
        self._replies = msgspec.msgpack.Decoder(Reply)

    def encode(self, message: Request | Reply) -> bytes:
        return self._encoder.encode(message)

    def request(self, header: bytes | memoryview) -> Request:
        """Raises :class:`Malformed`."""
        return _decode(self._requests, header)

    def reply(self, header: bytes | memoryview) -> Reply:
        """Raises :class:`Malformed`."""
        return _decode(self._replies, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    if len(header) > HEADER_BYTES:
        raise Malformed(f"a header of {len(header)} bytes; at most {HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(str(e)) from e


def check_name(name: str) -> str:
    """``name``, or ``ValueError`` when it is no object name."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as e:
        raise ValueError(f"segment name {name!r:.120}: expected 1 to 96 of 0-9 a-f . -: {e}") from e


def clip(text: str) -> str:
    """A reason, as long as the wire takes it."""
    return text if len(text) <= 256 else text[:255] + "…"


def short(name: str) -> str:
    """A segment's name in a log line."""
    return name if len(name) <= 13 else name[:12] + "…"
