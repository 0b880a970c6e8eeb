"""One record of one rank as bytes: a checked header, then the sections.  ``README.md`` specifies the format.

A header is canonical: it has exactly one encoding, and a reader refuses every other encoding.  Readers
therefore check every byte of a record, and two records are equal exactly when their bytes are equal.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .protocol import CacheValue, Verdict

VERSION = 1
ALIGNMENT = 64
"""Alignment of every section within the object, in bytes."""
MAX_BODY_BYTES = 1 << 18
"""The longest header body in bytes for writers and readers: about four thousand sections."""

_MAGIC = b"\x89HYPIC\r\n"
_UNSEALED = b"\x89hypic\r\n"
_PREFIX = struct.Struct(
    "<8sIIQII"
)  # magic, version, body bytes, payload bytes, CRC of payload, CRC of header
_HEADER_CRC_AT = _PREFIX.size - 4
PEEK_BYTES = _PREFIX.size + MAX_BODY_BYTES + ALIGNMENT
"""The number of an object's leading bytes that suffice for :func:`peek_value`, however large the header."""

_NAMESPACE = re.compile(rb'\{"namespace":"([0-9a-f]{64})",')
"""The start of every canonical header body."""
NAMESPACE_BYTES = 128
"""The number of an object's leading bytes that suffice for :func:`peek_namespace`."""

_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[!-~]{1,256}")
_MAX_COUNT = 1 << 48
"""The upper bound of every count and dimension, and of the payload's bytes."""
_MAX_DIMENSIONS = 8
_LONGEST_FLOPS = 2.2250738585072014e-308
"""No finite positive float has a longer decimal form."""


class Fault(Enum):
    """The reasons for which a reader refuses an object."""

    TRUNCATED = "fewer bytes than the header says"
    OVERLONG = "more bytes than the header says"
    MAGIC = "not a record"
    UNSEALED = "an unfinished record"
    VERSION = "another version of the format"
    HEADER = "malformed header"
    HEADER_CHECKSUM = "header altered"
    PAYLOAD_CHECKSUM = "payload altered"
    FOREIGN = "another namespace, segment or rank"
    LAYOUT = "other sections than expected"

    @property
    def verdict(self) -> Verdict:
        foreign = self in (Fault.VERSION, Fault.FOREIGN, Fault.LAYOUT)
        return Verdict.FOREIGN if foreign else Verdict.DAMAGED


@dataclass(frozen=True)
class Section:
    """One tensor of a record; ``dtype`` is torch's name without ``torch.``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class RecordHeader:
    """A record's description of itself.

    ``namespace`` and ``key`` are SHA-256 digests in hex.  ``columns`` counts the tokens with K and V.
    ``value_tokens`` and ``value_flops`` are the saving of a hit (see :class:`~.protocol.CacheValue`).
    ``base``: key of the record that holds the K and V of the first ``first`` columns; empty without a base.
    """

    namespace: str
    key: str
    rank: int
    world: int
    columns: int
    leading: bool
    value_tokens: int
    value_flops: float
    sections: tuple[Section, ...]
    base: str = ""
    first: int = 0

    @property
    def own_columns(self) -> int:
        """The number of columns whose K and V are in this record."""
        return self.columns - self.first


@dataclass(frozen=True)
class SectionLimit:
    """A section that a reader can take.  ``up_to``: the first dimension may be smaller than that of
    ``shape``.  ``by_column``: the first dimension is the number of the record's own columns."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    up_to: bool = False
    by_column: bool = False

    def __post_init__(self) -> None:
        if self.up_to and not self.shape:
            raise ValueError(f"{self.name}: up_to needs a first dimension, the shape is ()")

    def admits(self, section: Section, own_columns: int) -> bool:
        if (section.name, section.dtype) != (self.name, self.dtype) or len(section.shape) != len(self.shape):
            return False
        if self.by_column:
            return section.shape == (own_columns, *self.shape[1:])
        if self.up_to:
            return section.shape[0] <= self.shape[0] and section.shape[1:] == self.shape[1:]
        return section.shape == self.shape


@dataclass(frozen=True)
class Expected:
    """The record that a reader asks for.  The reader refuses any other record, however sound.

    ``or_more``: the record may have more columns.  ``by_base``: the record may have a base.
    """

    namespace: str
    key: str
    rank: int
    world: int
    columns: int
    leading: bool
    sections: tuple[SectionLimit, ...]
    or_more: bool = False
    by_base: bool = False

    @property
    def max_nbytes(self) -> int:
        """Bytes of the largest object that can be the expected record."""
        if self.or_more:
            return _MAX_COUNT
        sections = tuple(Section(s.name, s.dtype, s.shape) for s in self.sections)
        largest = RecordHeader(
            self.namespace,
            self.key,
            self.rank,
            self.world,
            self.columns,
            self.leading,
            _MAX_COUNT,
            _LONGEST_FLOPS,
            sections,
            *((self.key, self.columns) if self.by_base and self.columns else ()),
        )
        return record_nbytes(largest)

    def fault(self, header: RecordHeader) -> Fault | None:
        """Return why ``header`` is not the expected header, or ``None``."""
        found = (header.namespace, header.key, header.rank, header.world, header.leading)
        if found != (self.namespace, self.key, self.rank, self.world, self.leading):
            return Fault.FOREIGN
        if header.columns != self.columns and not (self.or_more and header.columns > self.columns):
            return Fault.FOREIGN
        if header.base and not self.by_base:
            return Fault.LAYOUT
        if len(header.sections) != len(self.sections):
            return Fault.LAYOUT
        pairs, own = zip(self.sections, header.sections, strict=True), header.own_columns
        return None if all(limit.admits(section, own) for limit, section in pairs) else Fault.LAYOUT


@dataclass(frozen=True)
class OpenRecord:
    """A record after the check of every byte; ``sections`` are read-only views of the object itself."""

    header: RecordHeader
    sections: Mapping[str, memoryview]


def aligned_buffer(nbytes: int) -> memoryview:
    """Return fresh, writable, unfilled memory whose address is a multiple of :data:`ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory.data[start : start + nbytes]


def record_nbytes(header: RecordHeader) -> int:
    """Return the bytes of the whole object.  Raises ``ValueError`` for a header that no record can have."""
    return _payload_start(len(_encode(header))) + _payload_nbytes(header.sections)


def begin_record(buffer: memoryview, header: RecordHeader) -> dict[str, memoryview]:
    """Write the header and the padding; return a writable byte view of every section for the caller to fill.

    Raises ``ValueError`` unless ``buffer`` has exactly :func:`record_nbytes` bytes.  Every reader refuses the
    object until :func:`seal_record`.
    """
    body = _encode(header)
    start, payload = _payload_start(len(body)), _payload_nbytes(header.sections)
    if buffer.nbytes != start + payload:
        raise ValueError(f"buffer of {buffer.nbytes} bytes: the record takes {start + payload}")
    buffer = buffer.cast("B")
    _PREFIX.pack_into(buffer, 0, _UNSEALED, VERSION, len(body), payload, 0, 0)
    filled = _PREFIX.size + len(body)
    buffer[_PREFIX.size : filled] = body
    views: dict[str, memoryview] = {}
    for section, at in _places(header.sections):
        buffer[filled : start + at] = bytes(start + at - filled)
        filled = start + at + section.nbytes
        views[section.name] = buffer[start + at : filled]
    buffer[filled:] = bytes(buffer.nbytes - filled)
    return views


def seal_record(buffer: memoryview) -> None:
    """Compute and write the checksums, so that readers accept the object.  Reads all bytes of ``buffer``.

    Raises ``ValueError`` unless :func:`begin_record` filled this very buffer.
    """
    buffer = buffer.cast("B")
    if buffer.nbytes < _PREFIX.size or buffer[:8] != _UNSEALED:
        raise ValueError(f"buffer of {buffer.nbytes} bytes: expected a record that is begun and not sealed")
    _, version, body, payload, _, _ = _PREFIX.unpack_from(buffer)
    start = _payload_start(body)
    if start + payload != buffer.nbytes:
        raise ValueError(f"buffer of {buffer.nbytes} bytes: the record has {start + payload}")
    _PREFIX.pack_into(buffer, 0, _UNSEALED, version, body, payload, zlib.crc32(buffer[start:]), 0)
    struct.pack_into("<I", buffer, _HEADER_CRC_AT, _header_crc(buffer, start))
    buffer[:8] = _MAGIC


def open_record(data: memoryview, expected: Expected) -> OpenRecord | Fault:
    """Return the record in ``data`` if it is whole, unaltered and the expected record; else return the fault.

    Raises nothing, whatever the bytes.  Copies nothing but the header's body, and trusts no length in the
    bytes before a comparison with ``len(data)``.
    """
    data = data.toreadonly().cast("B")
    prefix = _read_prefix(data)
    if isinstance(prefix, Fault):
        return prefix
    end = prefix.start + prefix.payload
    if data.nbytes != end:
        return Fault.TRUNCATED if data.nbytes < end else Fault.OVERLONG
    header = _read_header(data, prefix)
    if isinstance(header, Fault):
        return header
    fault = expected.fault(header)
    if fault is not None:
        return fault
    if zlib.crc32(data[prefix.start :]) != prefix.payload_crc:
        return Fault.PAYLOAD_CHECKSUM
    views: dict[str, memoryview] = {}
    filled = prefix.start
    for section, at in _places(header.sections):
        if any(data[filled : prefix.start + at]):
            return Fault.HEADER
        filled = prefix.start + at + section.nbytes
        views[section.name] = data[prefix.start + at : filled]
    return OpenRecord(header, views)


def peek_value(prefix: bytes) -> tuple[str, str, CacheValue] | Fault:
    """Return namespace, key and cache value of the object that begins with ``prefix``, or the fault.

    The function does not look at the payload.  ``TRUNCATED``: ``prefix`` ends within the header.
    :data:`PEEK_BYTES` always suffice, 16 KiB for most headers.  Raises nothing, whatever the bytes.
    """
    data = memoryview(prefix)
    lengths = _read_prefix(data)
    if isinstance(lengths, Fault):
        return lengths
    if data.nbytes < lengths.start:
        return Fault.TRUNCATED
    header = _read_header(data, lengths)
    if isinstance(header, Fault):
        return header
    nbytes = lengths.start + lengths.payload
    return header.namespace, header.key, CacheValue(header.value_tokens, header.value_flops, nbytes)


def peek_namespace(prefix: bytes) -> str | None:
    """Return the namespace of the record that begins with ``prefix``, or ``None`` if no record begins like
    this.  :data:`NAMESPACE_BYTES` suffice.  The function checks nothing else: the record may be damaged."""
    found = _NAMESPACE.match(prefix, _PREFIX.size)
    return found[1].decode() if found and prefix.startswith(_MAGIC) else None


@dataclass(frozen=True)
class _Prefix:
    """The fixed part of a header.  Sizes are in bytes; ``start`` is the payload's offset in the object."""

    body: int
    payload: int
    start: int
    payload_crc: int
    header_crc: int


def _read_prefix(data: memoryview) -> _Prefix | Fault:
    if data.nbytes < _PREFIX.size:
        return Fault.TRUNCATED
    magic, version, body, payload, payload_crc, header_crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        return Fault.UNSEALED if magic == _UNSEALED else Fault.MAGIC
    if version != VERSION:
        return Fault.VERSION
    if body > MAX_BODY_BYTES or payload > _MAX_COUNT:
        return Fault.HEADER
    return _Prefix(body, payload, _payload_start(body), payload_crc, header_crc)


def _read_header(data: memoryview, prefix: _Prefix) -> RecordHeader | Fault:
    if _header_crc(data, prefix.start) != prefix.header_crc:
        return Fault.HEADER_CHECKSUM
    body_end = _PREFIX.size + prefix.body
    if any(data[body_end : prefix.start]):
        return Fault.HEADER
    header = _decode(bytes(data[_PREFIX.size : body_end]))
    if header is None or _payload_nbytes(header.sections) != prefix.payload:
        return Fault.HEADER
    return header


def _header_crc(data: memoryview, start: int) -> int:
    """Return the CRC of all bytes before the payload but the checksum itself.  The magic counts as sealed."""
    crc = zlib.crc32(data[8:_HEADER_CRC_AT], zlib.crc32(_MAGIC))
    return zlib.crc32(data[_PREFIX.size : start], crc)


def _payload_start(body: int) -> int:
    return _aligned(_PREFIX.size + body)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _places(sections: tuple[Section, ...]) -> Iterator[tuple[Section, int]]:
    """Yield every section and its offset in the payload: sections follow each other at aligned offsets."""
    end = 0
    for section in sections:
        start = _aligned(end)
        yield section, start
        end = start + section.nbytes


def _payload_nbytes(sections: tuple[Section, ...]) -> int:
    """Return the payload's bytes, up to the last section's last byte: no padding follows."""
    end = 0
    for section, start in _places(sections):
        end = start + section.nbytes
    return end


def _encode(header: RecordHeader) -> bytes:
    problem = _problem(header)
    if problem is not None:
        raise ValueError(f"record header: {problem}")
    body = _canonical(header)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"record header: {len(body)} bytes, at most {MAX_BODY_BYTES} are allowed")
    return body


def _canonical(header: RecordHeader) -> bytes:
    fields = {
        "namespace": header.namespace,
        "key": header.key,
        "rank": header.rank,
        "world": header.world,
        "columns": header.columns,
        "leading": header.leading,
        "tokens": header.value_tokens,
        "flops": float(header.value_flops),
        "sections": [[s.name, s.dtype, list(s.shape)] for s in header.sections],
        **({"base": header.base, "first": header.first} if header.base else {}),
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")


def _decode(body: bytes) -> RecordHeader | None:
    """Return the header whose encoding is ``body``, or ``None`` if no header has this encoding."""
    try:
        fields = json.loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        # Bytes that are not ASCII, and integers of thousands of digits, raise ValueError too.
        return None
    header = _from_fields(fields)
    if header is None or _problem(header) is not None:
        return None
    # Repeated fields, spaces, another order or spelling of numbers parse alike, but encode differently.
    return header if _canonical(header) == body else None


def _from_fields(fields: object) -> RecordHeader | None:
    """Return the header; ``None``: a type is wrong (an int is no float).  :func:`_problem` refuses bools."""
    match fields:
        case {
            "namespace": str(namespace),
            "key": str(key),
            "rank": int(rank),
            "world": int(world),
            "columns": int(columns),
            "leading": bool(leading),
            "tokens": int(tokens),
            "flops": float(flops),
            "sections": list(table),
            **rest,
        }:
            sections = tuple(s for s in map(_section, table) if s is not None)
            if len(sections) < len(table):
                return None
            base, first = rest.get("base", ""), rest.get("first", 0)
            if not isinstance(base, str) or type(first) is not int:
                return None
            return RecordHeader(
                namespace, key, rank, world, columns, leading, tokens, flops, sections, base, first
            )
    return None


def _section(row: object) -> Section | None:
    match row:
        case [str(name), str(dtype), list(shape)] if all(type(d) is int for d in shape):
            return Section(name, dtype, tuple(shape))
    return None


def _problem(header: RecordHeader) -> str | None:
    """Return why no record can have ``header``, or ``None``.  The types of the fields must be right."""
    for digest in (header.namespace, header.key, *([header.base] if header.base else [])):
        if _DIGEST.fullmatch(digest) is None:
            return f"{digest[:80]!r}: expected a digest of 64 hex digits"
    counts = (header.rank, header.world, header.columns, header.value_tokens)
    if any(type(n) is not int or not 0 <= n <= _MAX_COUNT for n in counts):
        return f"rank, world, columns, tokens are {counts}: expected integers from 0 to {_MAX_COUNT}"
    if not (0 < header.first <= header.columns if header.base else header.first == 0):
        return f"first column {header.first} of {header.columns}, base {header.base[:80]!r}: out of range"
    if header.rank >= header.world:
        return f"rank={header.rank}: expected less than world={header.world}"
    if not (math.isfinite(header.value_flops) and header.value_flops >= 0):
        return f"flops {header.value_flops}: expected a finite number >= 0"
    names: set[str] = set()
    for section in header.sections:
        if _NAME.fullmatch(section.name) is None or section.name in names:
            return f"section {section.name[:80]!r}: expected up to 256 ASCII characters, and no name twice"
        names.add(section.name)
        if section.dtype not in _ITEM_BYTES:
            return f"{section.name}: dtype {section.dtype[:80]!r}, expected one of {', '.join(_ITEM_BYTES)}"
        if len(section.shape) > _MAX_DIMENSIONS or not all(0 <= d <= _MAX_COUNT for d in section.shape):
            return f"{section.name}: at most {_MAX_DIMENSIONS} dimensions from 0 to {_MAX_COUNT} are allowed"
    payload = _payload_nbytes(header.sections)
    return None if payload <= _MAX_COUNT else f"{payload} bytes of sections, at most {_MAX_COUNT} are allowed"
