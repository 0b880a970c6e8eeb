"""Hostile bytes: nothing altered is accepted, nothing raises, nothing makes the reader take memory.

A hostile writer knows the format and gets every checksum right.  What it can do is to write a record of the
expected segment with other contents, or with another cache value: no checksum tells that from an honest one.
"""

import json
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_hypic.store.record import MAX_BODY_BYTES, Fault, OpenRecord, Section, open_record, peek_value

from .test_record import EXPECTED, HEADER, OTHER, written

MUTATIONS = 2_000
"""Of every kind."""

RECORD = bytes(written(seed=1))
TWIN = bytes(written(seed=2))
"""The same header with other sections."""
BODY_BYTES, PAYLOAD_BYTES = struct.unpack_from("<IQ", RECORD, 12)
START = len(RECORD) - PAYLOAD_BYTES
BODY = RECORD[32 : 32 + BODY_BYTES]
VALUE = range(BODY.index(b'"tokens"'), BODY.index(b',"sections"'))
"""What a hostile writer may change: it only decides what is evicted."""
EXTREMES = [0, 1, 63, 64, (1 << 15), (1 << 18), (1 << 18) + 1, (1 << 31) - 1, (1 << 31), (1 << 32) - 1]
LONG_EXTREMES = [*EXTREMES, (1 << 48), (1 << 48) + 1, (1 << 63) - 1, (1 << 63), (1 << 64) - 64, (1 << 64) - 1]


def forged(
    body: bytes,
    payload: bytes = RECORD[START:],
    *,
    version: int = 1,
    body_bytes: int | None = None,
    payload_bytes: int | None = None,
    padding: bytes | None = None,
) -> bytes:
    """An object whose checksums are right, whatever it says."""
    body_bytes = len(body) if body_bytes is None else body_bytes
    payload_bytes = len(payload) if payload_bytes is None else payload_bytes
    padding = bytes(-(32 + len(body)) % 64) if padding is None else padding
    fixed = struct.pack("<8sIIQI", b"\x89HYPIC\r\n", version, body_bytes, payload_bytes, zlib.crc32(payload))
    # What the reader takes for the header, if the length of the body is a lie.
    claimed = (body + padding + payload)[: -(-(32 + body_bytes) // 64) * 64 - 32]
    return fixed + struct.pack("<I", zlib.crc32(claimed, zlib.crc32(fixed))) + body + padding + payload


def fields(**changes: object) -> bytes:
    """The body with some fields changed, in the form that a writer gives it."""
    return json.dumps({**json.loads(BODY), **changes}, separators=(",", ":")).encode()


# -- damage: whoever altered the bytes knew nothing


def flipped(rng: random.Random) -> bytes:
    data = bytearray(RECORD)
    for bit in rng.sample(range(8 * len(data)), rng.randint(1, 8)):
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def truncated(rng: random.Random) -> bytes:
    return RECORD[: rng.randrange(len(RECORD))]


def extended(rng: random.Random) -> bytes:
    return RECORD + rng.choice([rng.randbytes, bytes])(rng.randint(1, 200))


def overwritten(rng: random.Random) -> bytes:
    at, n = rng.randrange(len(RECORD)), rng.randint(4, 300)
    patch = rng.choice([rng.randbytes(n), bytes(n), b"\xff" * n])
    data = (RECORD[:at] + patch + RECORD[at + n :])[: len(RECORD)]
    return data if data != RECORD else RECORD[:-1]


def moved(rng: random.Random) -> bytes:
    """Bytes cut out or put in twice, the rest moved up or down."""
    at, n = rng.randrange(len(RECORD)), rng.randint(1, 64)
    return rng.choice([RECORD[:at] + RECORD[at + n :], RECORD[: at + n] + RECORD[at:]])


def swapped(rng: random.Random) -> bytes:
    """Two stretches of the payload change places: as large as sections, or as sectors."""
    n = rng.choice([16, 32, 64])
    a, b = rng.sample(range(PAYLOAD_BYTES // n), 2)
    parts = [RECORD[START + i * n : START + (i + 1) * n] for i in range(PAYLOAD_BYTES // n)]
    if parts[a] == parts[b]:
        return RECORD[:-1]
    parts[a], parts[b] = parts[b], parts[a]
    return RECORD[:START] + b"".join(parts)


def spliced(rng: random.Random) -> bytes:
    """The first bytes of one record, the last of another of the same size: a write that was torn."""
    at = rng.choice([START, rng.randrange(28, len(RECORD) - 4)])
    first, last = rng.sample([RECORD, TWIN], 2)
    return first[:at] + last[at:]


def unsealed(rng: random.Random) -> bytes:
    """A record whose writer stopped somewhere."""
    return bytes(written(HEADER, rng.getrandbits(32), stops_at=rng.randint(0, len(HEADER.sections))))


# -- forgery: the checksums are right


def lengths_forged(rng: random.Random) -> bytes:
    lies = {
        "version": [0, *EXTREMES[2:], rng.randrange(2, 1 << 32)],
        "body_bytes": [*EXTREMES, BODY_BYTES - 1, BODY_BYTES + rng.randint(1, 99)],
        "payload_bytes": [*LONG_EXTREMES, PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, rng.getrandbits(64)],
    }
    what = rng.choice(list(lies))
    return forged(BODY, **{what: rng.choice(lies[what])})


def body_byte_forged(rng: random.Random) -> bytes:
    body = bytearray(BODY)
    at = rng.choice([i for i in range(len(body)) if i not in VALUE])
    body[at] = rng.choice([b for b in range(256) if b != body[at]])
    return forged(bytes(body))


HOSTILE = [
    None, True, False, -1, 0, 3, 1 << 31, 1 << 48, (1 << 48) + 1, 1 << 63, 1 << 64, 10**4000, 1.0, -0.5,
    1e308, float("nan"), float("inf"), float("-inf"), "", "1", "ab" * 32, "AB" * 32, "\u0661" * 64, "\ud800",
    "a\0b", "a" * 1000, [], [[]], [None], [1, 2], {}, {"a": 1}, [["x", "uint8", [1]]], [[[[[[[[]]]]]]]],
]  # fmt: skip


def field_forged(rng: random.Random) -> bytes:
    name = rng.choice(["namespace", "key", "rank", "world", "columns", "leading", "sections"])
    values = [v for v in HOSTILE if repr(v) != repr(json.loads(BODY)[name])]
    return forged(fields(**{name: rng.choice(values)}))


def value_forged(rng: random.Random) -> bytes:
    name, good = rng.choice([("tokens", int), ("flops", float)])
    bound = 1 << 48
    values = [v for v in HOSTILE if type(v) is not good or not 0 <= v <= (bound if good is int else 1e308)]
    return forged(fields(**{name: rng.choice(values)}))


def fields_forged(rng: random.Random) -> bytes:
    """A field missing, one too many, or in another place."""
    body = json.loads(BODY)
    what = rng.randrange(3)
    if what == 0:
        del body[rng.choice(list(body))]
    elif what == 1:
        body[rng.choice(["", "Key", "offsets", "x" * rng.randint(1, 50)])] = rng.choice(HOSTILE)
    else:
        moved = rng.choice(list(body)[:-1])
        body[moved] = body.pop(moved)
    return forged(json.dumps(body, separators=(",", ":")).encode())


def spelling_forged(rng: random.Random) -> bytes:
    """The same header for a JSON reader, in other bytes."""
    what = rng.randrange(6)
    if what == 0:
        at = rng.choice([i for i, b in enumerate(BODY) if b in b"{[,:]}"])
        return forged(BODY[:at] + rng.choice([b" ", b"\n", b"\t" * 50]) + BODY[at:])
    if what == 1:
        return forged(BODY[:-1] + b"," + rng.choice([b'"rank":1}', b'"leading":false}', BODY[1:]]))
    if what == 2:
        at = rng.choice([i for i, b in enumerate(BODY) if chr(b).isalpha() and i < BODY.index(b'"rank"')])
        return forged(BODY[:at] + b"\\u%04x" % BODY[at] + BODY[at + 1 :])
    if what == 3:
        name, n = rng.choice([(b'"rank":', b"1"), (b'"world":', b"2"), (b'"columns":', b"10")])
        spelt = rng.choice([n + b".0", n + b"e0", n + b"E+00", b"+" + n, b"0" + n])
        return forged(BODY.replace(name + n, name + spelt))
    if what == 4:
        return forged(BODY.replace(b"1500000000000.0", rng.choice([b"1.5e12", b"1500000000000", b"15e11"])))
    encoding = rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
    return forged(BODY.decode().encode(encoding))


def table_forged(rng: random.Random) -> bytes:
    """Sections of other names, dtypes and shapes, whether or not they sum up to the payload."""
    table = json.loads(BODY)["sections"]
    row, what = rng.randrange(len(table)), rng.randrange(5)
    if what == 0:
        table[row] = rng.choice(HOSTILE)
    elif what == 1:
        table[row][rng.randrange(3)] = rng.choice(HOSTILE)
    elif what == 2:
        shape = table[row][2]
        shape[rng.randrange(len(shape))] = rng.choice([*HOSTILE[:5], -(1 << 40), 1 << 47, 10**1000, 1e3])
    elif what == 3:
        table[row][2] = rng.choice(
            [[1 << 40] * 8, [0, 1 << 48], [-1, -320], [1] * 9, [1 << 62, 4], table[row][:2]]
        )
    else:
        table = rng.choice([table[::-1], [*table, table[row]], table[:row] + table[row + 1 :], table * 100])
    return forged(fields(sections=table))


def shape_forged(rng: random.Random) -> bytes:
    """A sound record that differs in its sections only, often in the same number of bytes."""
    sections = list(HEADER.sections)
    row = rng.randrange(len(sections))
    old = sections[row]
    changes: list[dict[str, Any]] = [
        {"dtype": rng.choice([d for d in ("int16", "float64", "int8", "bool") if d != old.dtype])},
        {"name": rng.choice([old.name + "x", "x", "..", "__proto__", "$", "/"])},
        {"shape": (*old.shape, 1)},
        {"shape": (old.shape[0] + 2, *old.shape[1:])},
        {"shape": (1, *old.shape)},
    ]
    sections[row] = replace(old, **rng.choice(changes))
    return bytes(written(replace(HEADER, sections=tuple(sections)), rng.getrandbits(32)))


def sections_forged(rng: random.Random) -> bytes:
    """A sound record with other sections altogether."""
    kept = [s for s in HEADER.sections if rng.random() < 0.7]
    more = [Section(f"more{i}", "uint8", (rng.randint(0, 99),)) for i in range(rng.randint(1, 3))]
    sections = kept + more
    rng.shuffle(sections)
    return bytes(written(replace(HEADER, sections=tuple(sections)), rng.getrandbits(32)))


def identity_forged(rng: random.Random) -> bytes:
    """A sound record of something else."""
    changes: dict[str, list[Any]] = {
        "namespace": [OTHER, HEADER.key],
        "key": [rng.randbytes(32).hex()],
        "rank": [0],
        "world": [rng.randint(3, 1000)],
        "columns": [0, 9, 11, 1 << 48],
        "leading": [True],
    }
    what = rng.choice(list(changes))
    return bytes(written(replace(HEADER, **{what: rng.choice(changes[what])}), rng.getrandbits(32)))


def padding_forged(rng: random.Random) -> bytes:
    """Bytes hidden where nothing should be."""
    if rng.random() < 0.5:
        padding = bytearray(-(32 + BODY_BYTES) % 64)
        padding[rng.randrange(len(padding))] = rng.randint(1, 255)
        return forged(BODY, padding=bytes(padding))
    payload = bytearray(RECORD[START:])
    payload[rng.choice([*range(323, 384)])] = rng.randint(1, 255)
    return forged(BODY, bytes(payload))


def tail_forged(rng: random.Random) -> bytes:
    """Bytes after the last section, counted in the payload; or too few."""
    n = rng.choice([-64, -1, 1, 64, rng.randint(2, 500)])
    return forged(BODY, RECORD[START:n] if n < 0 else RECORD[START:] + rng.randbytes(n))


KINDS: list[tuple[Callable[[random.Random], bytes], set[Fault]]] = [
    (flipped, set(Fault) - {Fault.FOREIGN, Fault.LAYOUT}),
    (truncated, {Fault.TRUNCATED}),
    (extended, {Fault.OVERLONG}),
    (overwritten, set(Fault) - {Fault.FOREIGN, Fault.LAYOUT}),
    (moved, {Fault.TRUNCATED, Fault.OVERLONG, Fault.MAGIC, Fault.VERSION, Fault.HEADER}),
    (swapped, {Fault.PAYLOAD_CHECKSUM, Fault.TRUNCATED}),
    (spliced, {Fault.PAYLOAD_CHECKSUM, Fault.HEADER_CHECKSUM}),
    (unsealed, {Fault.UNSEALED}),
    (lengths_forged, {Fault.VERSION, Fault.TRUNCATED, Fault.OVERLONG, Fault.HEADER}),
    (body_byte_forged, {Fault.HEADER, Fault.FOREIGN, Fault.LAYOUT}),
    (field_forged, {Fault.HEADER, Fault.FOREIGN}),
    (value_forged, {Fault.HEADER}),
    (fields_forged, {Fault.HEADER}),
    (spelling_forged, {Fault.HEADER}),
    (table_forged, {Fault.HEADER, Fault.LAYOUT}),
    (shape_forged, {Fault.LAYOUT}),
    (sections_forged, {Fault.LAYOUT}),
    (identity_forged, {Fault.FOREIGN}),
    (padding_forged, {Fault.HEADER}),
    (tail_forged, {Fault.HEADER}),
]


def test_what_is_altered_is_otherwise_accepted():
    """Without this, all tests below would pass for a reader that refuses everything."""
    for data in (RECORD, TWIN, forged(BODY), bytes(written())):
        assert isinstance(open_record(memoryview(data), EXPECTED), OpenRecord)
    assert forged(BODY) == RECORD


@pytest.mark.parametrize(("mutate", "faults"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_mutations_are_refused(mutate: Callable[[random.Random], bytes], faults: set[Fault]):
    for seed in range(MUTATIONS):
        data = mutate(random.Random(seed))
        assert data not in (RECORD, TWIN)
        assert open_record(memoryview(data), EXPECTED) in faults, f"seed {seed}"
        peek_value(data)


def test_every_fault_was_found():
    assert MUTATIONS * len(KINDS) >= 10_000
    found = {
        open_record(memoryview(mutate(random.Random(seed))), EXPECTED)
        for mutate, _ in KINDS
        for seed in range(40)
    }
    assert found == set(Fault)


FULL = MAX_BODY_BYTES


@contextmanager
def memory_below(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * FULL,
        b'{"":' * (FULL // 4),
        b"[" * (FULL // 2) + b"]" * (FULL // 2),
        b"[" + b"[]," * (FULL // 3 - 2) + b"[]]",
        b"[" + b"{}," * (FULL // 3 - 2) + b"{}]",
        b"9" * FULL,
        b"-" + b"9" * (FULL - 1),
        b"1e" + b"9" * (FULL - 2),
        b"0." + b"0" * (FULL - 2),
        b"[" + b"9" * 4300 + (b"," + b"9" * 4300) * 59 + b"]",
        b'"' + b"\\u0000" * (FULL // 6 - 1) + b'"',
        b'"' + b"\xf0\x9f\x98\x80" * (FULL // 4 - 1) + b'"',
        fields(sections=[["s", "uint8", [0]]] * 9000),
        fields(sections=[[f"s{i}", "uint8", [1 << 48]] for i in range(6000)]),
        fields(sections=[["s", "uint8", [1 << 48] * 9000]]),
        fields(key="a" * (FULL - 1000)),
        fields(**{f"k{i}": 0 for i in range(20_000)}),
        b"NaN",
        b"",
        b"\0" * FULL,
    ],
    ids=range(20),
)
def test_memory_of_hostile_headers_is_bounded(body: bytes):
    """All of them end within the longest body that a reader parses; payloads that they claim do not exist."""
    assert len(body) <= FULL
    data = forged(body)
    with memory_below(8 << 20):
        assert open_record(memoryview(data), EXPECTED) is Fault.HEADER
        assert peek_value(data) is Fault.HEADER


@pytest.mark.parametrize("payload_bytes", LONG_EXTREMES)
@pytest.mark.parametrize("body_bytes", EXTREMES)
def test_no_memory_for_claimed_lengths(body_bytes: int, payload_bytes: int):
    data = forged(BODY, body_bytes=body_bytes, payload_bytes=payload_bytes)
    with memory_below(64 << 10):
        assert isinstance(open_record(memoryview(data), EXPECTED), Fault)
        assert isinstance(peek_value(data), Fault)


def test_a_body_longer_than_allowed_is_not_parsed():
    data = forged(b" " * (FULL + 1 - BODY_BYTES) + BODY)
    assert open_record(memoryview(data), EXPECTED) is Fault.HEADER
    with memory_below(16 << 10):
        open_record(memoryview(data), EXPECTED)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([HEADER.key]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(list(json.loads(BODY))), inner)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=300))
@example(b"")
@settings(max_examples=500)
def test_any_bytes(data: bytes):
    for hostile in (data, b"\x89HYPIC\r\n" + data, RECORD[:32] + data, forged(data)):
        assert isinstance(open_record(memoryview(hostile), EXPECTED), Fault)
        assert isinstance(peek_value(hostile), Fault)


IDENTITY = [field for field in json.loads(BODY) if field not in ("tokens", "flops")]


@given(st.none() | st.sampled_from(IDENTITY) | st.tuples(st.integers(0, 3), st.integers(0, 2)), JSON)
@settings(max_examples=1500)
def test_any_json(where: str | tuple[int, int] | None, value: object):
    """Instead of the body, of a field, or of a cell of the table of sections."""
    body = json.loads(BODY)
    if where is None:
        body = value
    elif isinstance(where, str):
        body[where] = value
    else:
        body["sections"][where[0]][where[1]] = value
    data = forged(json.dumps(body, separators=(",", ":")).encode())
    if data == RECORD:
        return
    fault = open_record(memoryview(data), EXPECTED)
    assert isinstance(fault, Fault)
    assert where is not None or fault is peek_value(data) is Fault.HEADER


def test_another_cache_value_is_all_that_a_forger_can_say():
    record = open_record(memoryview(forged(fields(tokens=7, flops=0.5))), EXPECTED)
    assert isinstance(record, OpenRecord)
    assert record.header == replace(HEADER, value_tokens=7, value_flops=0.5)
    assert bytes(record.sections["layer.1/s"]) == RECORD[-192:]
