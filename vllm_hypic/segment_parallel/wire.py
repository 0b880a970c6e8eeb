"""Wire format of messages between senders and a receiver: one small header each, bounded and strict.

A message is one header frame; only ``Data`` has a second frame, with the record's bytes.  With NIXL the bytes
travel separately: ``Held`` tells a receiver where to read them (``nixl.py``).  Senders (DEALER) greet first
on each connection; a receiver (ROUTER) answers ``Again`` to any message from a peer that has not greeted.
libzmq sends an empty message on each new connection (``ZMQ_PROBE_ROUTER``).  A receiver therefore says
``Again`` as soon as a sender has connected, and also after either side's restart.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

VERSION: Final = 2
HEADER_BYTES: Final = 65536
"""Limit on a header frame's bytes."""
MOST_NAMES: Final = 512
"""Limit on the names in a :class:`Withdraw` or :class:`Stored`."""
METADATA_BYTES: Final = 16384
"""Limit on the bytes of a NIXL agent's metadata; each network device adds some hundred bytes."""

_NAME_PATTERN: Final = r"\A[0-9a-f.-]+\Z"
Name = Annotated[str, Meta(min_length=1, max_length=96, pattern=_NAME_PATTERN)]
"""A :data:`~vllm_hypic.store.protocol.ObjectName`."""
Text = Annotated[str, Meta(max_length=256)]
Size = Annotated[int, Meta(ge=1, le=1 << 48)]


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """A sender's first message on a connection.  Unknown fields at the end are ignored, so that a receiver
    can tell a peer of a later version that versions differ."""

    version: Annotated[int, Meta(ge=0, le=1 << 31)]
    namespace: Text
    sender: Annotated[str, Meta(min_length=16, max_length=64)]
    """The sender's random id: a new connection voids all grants of the same sender's earlier connection."""


class Offer(Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    name: Name
    nbytes: Size


class Data(Struct, frozen=True, array_like=True, tag="data", forbid_unknown_fields=True):
    """Announces the record's bytes, which follow as a second frame of exactly the offered size."""

    name: Name


class Held(Struct, frozen=True, array_like=True, tag="held", forbid_unknown_fields=True):
    """Replaces ``Data`` after a ``ClearToSend`` with ``pull``: the offered bytes lie at ``address`` of the
    NIXL agent that ``metadata`` describes, until the receiver answers."""

    name: Name
    address: Annotated[int, Meta(ge=1, le=1 << 62)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=METADATA_BYTES)]


class Retract(Struct, frozen=True, array_like=True, tag="retract", forbid_unknown_fields=True):
    """Revokes the sender's offer."""

    name: Name


class Withdraw(Struct, frozen=True, array_like=True, tag="withdraw", forbid_unknown_fields=True):
    """A router's message: no sender will send these records."""

    names: Annotated[list[Name], Meta(max_length=MOST_NAMES)]


class Stored(Struct, frozen=True, array_like=True, tag="stored", forbid_unknown_fields=True):
    """A router's message: these records are in a tier that the instance shares with the worker that computed
    them.  Only instances that describe a shared tier get this message: older versions do not know it."""

    names: Annotated[list[Name], Meta(max_length=MOST_NAMES)]


class Again(Struct, frozen=True, array_like=True, tag="again", forbid_unknown_fields=True):
    """Asks the peer to greet, then to repeat all messages that are still unanswered."""


class Welcome(Struct, frozen=True, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """Accepts ``Hello``.  A repeated ``Welcome`` changes nothing: a receiver uses it to find lost peers."""


class Unwelcome(Struct, frozen=True, array_like=True, tag="unwelcome", forbid_unknown_fields=True):
    """Rejects ``Hello``: the receiver will take no records from this sender."""

    reason: Text


class ClearToSend(Struct, frozen=True, array_like=True, tag="go", forbid_unknown_fields=True):
    """Asks the sender for the record's bytes."""

    name: Name
    pull: bool = False
    """Whether the sender may answer with ``Held`` instead of ``Data``."""


class Done(Struct, frozen=True, array_like=True, tag="done", forbid_unknown_fields=True):
    """Tells the sender that the record is here already, or no longer wanted."""

    name: Name


class Ack(Struct, frozen=True, array_like=True, tag="taken", forbid_unknown_fields=True):
    """Tells the sender that the receiver has taken the record."""

    name: Name


class Nack(Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """Tells the sender that the receiver refuses the record or its offer."""

    name: Name
    reason: Text


class Withdrawn(Struct, frozen=True, array_like=True, tag="withdrawn", forbid_unknown_fields=True):
    """Confirms ``Withdraw``."""


class Noted(Struct, frozen=True, array_like=True, tag="noted", forbid_unknown_fields=True):
    """Confirms ``Stored``."""


Request = Hello | Offer | Data | Held | Retract | Withdraw | Stored
"""Messages of senders and routers to a receiver."""
Reply = Again | Welcome | Unwelcome | ClearToSend | Done | Ack | Nack | Withdrawn | Noted
"""Answers of a receiver."""


class Malformed(Exception):
    """Raised for a message that violates the protocol."""


T = TypeVar("T")


class Codec:
    """Encode and decode headers.  Only one thread may use a codec, as threads must not share its encoder."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(Request)
        self._replies = msgspec.msgpack.Decoder(Reply)

    def encode(self, message: Request | Reply) -> bytes:
        return self._encoder.encode(message)

    def request(self, header: bytes | memoryview) -> Request:
        """Decode a message to a receiver.  Raises :class:`Malformed`."""
        return _decode(self._requests, header)

    def reply(self, header: bytes | memoryview) -> Reply:
        """Decode an answer of a receiver.  Raises :class:`Malformed`."""
        return _decode(self._replies, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    if len(header) > HEADER_BYTES:
        raise Malformed(f"a header of {len(header)} bytes; at most {HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(str(e)) from e


def check_name(name: str) -> str:
    """Return ``name``, or raise ``ValueError`` when it is not a valid object name."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as e:
        raise ValueError(f"segment name {name!r:.120}: expected 1 to 96 of 0-9 a-f . -: {e}") from e


def clip(text: str) -> str:
    """Return ``text``, cut to the 256 characters that a :data:`Text` may have."""
    return text if len(text) <= 256 else text[:255] + "…"


def short(name: str) -> str:
    """Return ``name``, cut to at most 13 characters for a log line."""
    return name if len(name) <= 13 else name[:12] + "…"
