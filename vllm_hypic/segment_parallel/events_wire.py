"""Wire format of events: messages by which instances publish their records and load.

A message has two frames: a topic and a msgpack body.  Topic ``b"all"`` carries changes and heartbeats to
every subscriber; topic ``b"snap:" + 16 hex digits`` carries one subscriber's snapshot.  A message holds at
most :data:`NAMES_AT_ONCE` names, so that a bound on messages also bounds bytes.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

ALL = b"all"
_SNAPSHOT = re.compile(rb"snap:[0-9a-f]{16}")

HEARTBEAT_S = 0.25
NAMES_AT_ONCE = 4096
MOST_NAMES = 1 << 22
"""Limit on one instance's names.  No real instance has more: a view that grows beyond is given up."""
MOST_BYTES = 1 << 20
"""Largest frame; a larger one closes the connection before it is read."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=NAMES_AT_ONCE)]
_Boot = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Parts = Annotated[int, msgspec.Meta(ge=1, le=MOST_NAMES // NAMES_AT_ONCE)]


class Changes(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Change number ``seq`` of the engine process ``boot``; the first is 1."""

    boot: _Boot
    seq: _Count
    resident: _Names
    pending: _Names
    gone: _Names
    load_tokens: _Count
    """Number of prompt tokens still to be prefilled."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Confirms that no record changed since change ``seq``, and gives the present load."""

    boot: _Boot
    seq: _Count
    load_tokens: _Count


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Part ``part`` (from 0) of ``parts`` of an instance's complete state after change ``seq``."""

    boot: _Boot
    seq: _Count
    part: _Count
    parts: _Parts
    resident: _Names
    pending: _Names
    load_tokens: _Count


Message = Changes | Heartbeat | Snapshot

encode = msgspec.msgpack.Encoder().encode
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(frames: Sequence[bytes], snapshot_topic: bytes) -> Message | None:
    """Return the message in ``frames``; ``None``: malformed, or a snapshot for a topic other than
    ``snapshot_topic``."""
    if len(frames) != 2:
        return None
    try:
        message = _DECODER.decode(frames[1])
    except msgspec.MsgspecError:
        return None
    expected = snapshot_topic if isinstance(message, Snapshot) else ALL
    return message if frames[0] == expected else None


def new_snapshot_topic() -> bytes:
    """Return a random topic for one subscriber's snapshot."""
    return b"snap:" + secrets.token_hex(8).encode()


def asked_snapshot(frame: bytes) -> bytes | None:
    """Return the topic on which a subscriber asks for a snapshot; ``None`` when ``frame`` asks for none."""
    topic = frame[1:]
    return topic if frame[:1] == b"\x01" and _SNAPSHOT.fullmatch(topic) else None


class Presence(Enum):
    """State of a record at an instance."""

    RESIDENT = "resident"
    PENDING = "pending"
    GONE = "gone"


@dataclass(frozen=True)
class NameBatch:
    """Names by state; a batch fits one message."""

    resident: list[str]
    pending: list[str]
    gone: list[str]


def batches(states: Mapping[str, Presence]) -> Iterator[NameBatch]:
    """Yield ``states`` in batches of at most :data:`NAMES_AT_ONCE` names; no batch without names."""
    names = iter(states)
    while taken := list(itertools.islice(names, NAMES_AT_ONCE)):
        by: dict[Presence, list[str]] = {state: [] for state in Presence}
        for name in taken:
            by[states[name]].append(name)
        yield NameBatch(by[Presence.RESIDENT], by[Presence.PENDING], by[Presence.GONE])
