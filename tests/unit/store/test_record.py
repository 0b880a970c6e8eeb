"""The record format: what is written is read back, and the bytes are those of the README."""

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_hypic.store.protocol import CacheValue, Verdict
from vllm_hypic.store.record import (
    ALIGNMENT,
    NAMESPACE_BYTES,
    PEEK_BYTES,
    Expected,
    Fault,
    OpenRecord,
    RecordHeader,
    Section,
    SectionLimit,
    aligned_buffer,
    begin_record,
    open_record,
    peek_namespace,
    peek_value,
    record_nbytes,
    seal_record,
)

NAMESPACE, KEY, OTHER = "ab" * 32, "cd" * 32, "ef" * 32
WHOSE = {"namespace": NAMESPACE, "key": KEY, "rank": 1, "world": 2, "columns": 10, "leading": False}
HEADER = RecordHeader(
    **WHOSE,
    value_tokens=26,
    value_flops=1.5e12,
    sections=(
        Section("layer.0/k", "bfloat16", (10, 2, 8)),
        Section("layer.1/heads", "uint8", (3,)),
        Section("layer.1/t", "float16", (2, 4, 4)),
        Section("layer.1/s", "float32", (3, 4, 4)),
    ),
)
EXPECTED = Expected(
    **WHOSE,
    sections=(
        SectionLimit("layer.0/k", "bfloat16", (10, 2, 8)),
        SectionLimit("layer.1/heads", "uint8", (3,)),
        SectionLimit("layer.1/t", "float16", (3, 4, 4), up_to=True),
        SectionLimit("layer.1/s", "float32", (3, 4, 4)),
    ),
)


def written(header: RecordHeader = HEADER, seed: int = 0, stops_at: int | None = None) -> memoryview:
    """A sealed record of ``header`` with random sections, in a buffer that was not clean; or one whose writer
    stops at a section."""
    buffer = aligned_buffer(record_nbytes(header))
    buffer[:] = b"\xff" * buffer.nbytes
    for view in list(begin_record(buffer, header).values())[:stops_at]:
        view[:] = np.random.default_rng(seed).bytes(view.nbytes)
    if stops_at is None:
        seal_record(buffer)
    return buffer


def limits(header: RecordHeader) -> Expected:
    """What exactly ``header``, of :data:`WHOSE`, satisfies."""
    return Expected(**WHOSE, sections=tuple(SectionLimit(s.name, s.dtype, s.shape) for s in header.sections))


def test_round_trip_is_bit_exact_and_copies_nothing():
    buffer = aligned_buffer(record_nbytes(HEADER))
    views = begin_record(buffer, HEADER)
    filled = {name: np.random.default_rng(1).bytes(view.nbytes) for name, view in views.items()}
    for name, view in views.items():
        view[:] = filled[name]
    seal_record(buffer)

    record = open_record(buffer, EXPECTED)
    assert isinstance(record, OpenRecord)
    assert record.header == HEADER
    assert {name: bytes(view) for name, view in record.sections.items()} == filled
    for name, view in record.sections.items():
        assert view.readonly
        assert np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0
        assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(views[name], np.uint8))


def test_bytes_are_those_of_the_readme():
    data = bytes(written())
    body = (
        f'{{"namespace":"{NAMESPACE}","key":"{KEY}","rank":1,"world":2,"columns":10,"leading":false,"tokens":26,'
        '"flops":1500000000000.0,"sections":[["layer.0/k","bfloat16",[10,2,8]],["layer.1/heads","uint8",[3]],'
        '["layer.1/t","float16",[2,4,4]],["layer.1/s","float32",[3,4,4]]]}'
    ).encode()
    start = -(-(32 + len(body)) // 64) * 64
    payload = 320 + 64 + 64 + 192
    magic, version, body_bytes, payload_bytes, payload_crc, header_crc = struct.unpack_from("<8sIIQII", data)
    assert (magic, version, body_bytes, payload_bytes) == (b"\x89HYPIC\r\n", 1, len(body), payload)
    assert data[32 : 32 + len(body)] == body
    assert data[32 + len(body) : start] == bytes(start - 32 - len(body))
    assert data[start + 323 : start + 384] == bytes(61)
    assert payload_crc == zlib.crc32(data[start:])
    assert header_crc == zlib.crc32(data[:28] + data[32:start])
    assert len(data) == start + payload


def test_refused_until_sealed():
    buffer = aligned_buffer(record_nbytes(HEADER))
    begin_record(buffer, HEADER)
    fault = open_record(buffer, EXPECTED)
    assert fault is Fault.UNSEALED and fault.verdict is Verdict.DAMAGED
    assert peek_value(bytes(buffer)) is Fault.UNSEALED


def test_sealed_once():
    with pytest.raises(ValueError, match="begun and not sealed"):
        seal_record(written())
    longer = memoryview(bytearray(record_nbytes(HEADER) + 1))
    begin_record(longer[:-1], HEADER)
    with pytest.raises(ValueError, match=f"has {record_nbytes(HEADER)}"):
        seal_record(longer)


@pytest.mark.parametrize("difference", [-1, 1])
def test_buffer_of_another_size(difference):
    nbytes = record_nbytes(HEADER)
    with pytest.raises(ValueError, match=f"the record takes {nbytes}"):
        begin_record(memoryview(bytearray(nbytes + difference)), HEADER)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"namespace": OTHER}, Fault.FOREIGN),
        ({"key": OTHER}, Fault.FOREIGN),
        ({"rank": 0}, Fault.FOREIGN),
        ({"world": 4}, Fault.FOREIGN),
        ({"columns": 11}, Fault.FOREIGN),
        ({"leading": True}, Fault.FOREIGN),
        ({"sections": EXPECTED.sections[:-1]}, Fault.LAYOUT),
        ({"sections": EXPECTED.sections[::-1]}, Fault.LAYOUT),
        ({"sections": (*EXPECTED.sections, SectionLimit("more", "uint8", (0,)))}, Fault.LAYOUT),
    ],
)
def test_another_record_than_expected_is_foreign(change, fault):
    found = open_record(written(), replace(EXPECTED, **change))
    assert found is fault and found.verdict is Verdict.FOREIGN


@pytest.mark.parametrize(
    ("place", "section"),
    [
        (2, Section("layer.1/T", "float16", (2, 4, 4))),
        (2, Section("layer.1/t", "bfloat16", (2, 4, 4))),
        (2, Section("layer.1/t", "float16", (4, 4, 4))),
        (2, Section("layer.1/t", "float16", (2, 4, 2))),
        (2, Section("layer.1/t", "float16", (2, 16))),
        (2, Section("layer.1/t", "float16", ())),
        (0, Section("layer.0/k", "bfloat16", (9, 2, 8))),  # not "up to"
    ],
)
def test_another_section_than_expected_is_refused(place, section):
    sections = (*HEADER.sections[:place], section, *HEADER.sections[place + 1 :])
    assert open_record(written(replace(HEADER, sections=sections)), EXPECTED) is Fault.LAYOUT


@pytest.mark.parametrize("tiles", [0, 1, 2, 3])
def test_up_to_lets_the_first_dimension_shrink(tiles):
    sections = (*HEADER.sections[:2], Section("layer.1/t", "float16", (tiles, 4, 4)), HEADER.sections[3])
    data = written(replace(HEADER, sections=sections))
    record = open_record(data, EXPECTED)
    assert isinstance(record, OpenRecord)
    assert record.sections["layer.1/t"].nbytes == tiles * 32
    assert data.nbytes <= EXPECTED.max_nbytes


def test_largest_object_bounds_every_acceptable_one_tightly():
    exact = limits(HEADER)
    extreme = replace(HEADER, value_tokens=1 << 48, value_flops=2.2250738585072014e-308)
    assert record_nbytes(extreme) == exact.max_nbytes
    assert exact.max_nbytes - record_nbytes(HEADER) < 2 * ALIGNMENT


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float8_e4m3fn", "int16", "bfloat16", "float32", "int64"])
def test_sizes_of_dtypes(dtype):
    size = {"bool": 1, "uint8": 1, "float8_e4m3fn": 1, "int16": 2, "bfloat16": 2, "float32": 4, "int64": 8}
    assert Section("x", dtype, (3, 5)).nbytes == 15 * size[dtype]
    assert Section("x", dtype, ()).nbytes == size[dtype]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"namespace": "ab"}, "64 hex digits"),
        ({"key": "CD" * 32}, "64 hex digits"),
        ({"key": "cd" * 32 + "\n"}, "64 hex digits"),
        ({"rank": 2}, "rank=2: expected less than world=2"),
        ({"rank": -1}, "integers from 0"),
        ({"columns": True}, "integers from 0"),
        ({"value_tokens": 1 << 60}, "integers from 0"),
        ({"value_flops": float("nan")}, "finite"),
        ({"value_flops": float("inf")}, "finite"),
        ({"value_flops": -1.0}, "finite"),
        ({"sections": (Section("", "uint8", (1,)),)}, "ASCII characters"),
        ({"sections": (Section("ü", "uint8", (1,)),)}, "ASCII characters"),
        ({"sections": (Section("x", "uint8", (1,)),) * 2}, "no name twice"),
        ({"sections": (Section("x", "complex64", (1,)),)}, "complex64"),
        ({"sections": (Section("x", "uint8", (-1,)),)}, "dimensions"),
        ({"sections": (Section("x", "uint8", (1,) * 9),)}, "dimensions"),
        ({"sections": (Section("x", "uint8", (1 << 40, 1 << 40)),)}, "bytes of sections"),
        ({"sections": tuple(Section(f"{i:0250}", "uint8", ()) for i in range(2000))}, "at most 262144"),
    ],
)
def test_header_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        record_nbytes(replace(HEADER, **change))


def test_limit_up_to_needs_a_dimension():
    with pytest.raises(ValueError, match="first dimension"):
        SectionLimit("x", "uint8", (), up_to=True)


def test_peek():
    data = bytes(written())
    found = (NAMESPACE, KEY, CacheValue(26, 1.5e12, len(data)))
    assert peek_value(data) == found
    start = len(data) - 640
    assert peek_value(data[:start]) == found
    for n in range(start):
        assert peek_value(data[:n]) is Fault.TRUNCATED


def test_the_namespace_is_told_by_the_first_bytes():
    data = bytes(written())
    assert peek_namespace(data[:NAMESPACE_BYTES]) == peek_namespace(data) == NAMESPACE
    assert peek_namespace(data[: NAMESPACE_BYTES - 20]) is None
    assert peek_namespace(b"\x00" + data[1:]) is peek_namespace(b"") is None


def test_peek_bytes_are_enough_for_the_largest_header():
    names = [f"{i:0240}" for i in range(1010)]
    data = bytes(written(replace(HEADER, sections=tuple(Section(n, "uint8", ()) for n in names))))
    assert 250_000 < struct.unpack_from("<I", data, 12)[0] <= 1 << 18
    assert isinstance(peek_value(data[:PEEK_BYTES]), tuple)


@example(tokens=26, flops=1.5, shapes=[], dtype="uint8")
@given(
    tokens=st.integers(0, 1 << 48),
    flops=st.floats(0, allow_infinity=False, allow_nan=False),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=5),
    dtype=st.sampled_from(["uint8", "float16", "float64"]),
)
def test_every_header_survives(tokens, flops, shapes, dtype):
    sections = tuple(Section(f"s{i}", dtype, shape) for i, shape in enumerate(shapes))
    header = replace(HEADER, value_tokens=tokens, value_flops=flops, sections=sections)
    data = written(header)
    record = open_record(data, limits(header))
    assert isinstance(record, OpenRecord) and record.header == header
    assert list(record.sections) == [section.name for section in sections]
    assert data.nbytes <= limits(header).max_nbytes
    body = struct.unpack_from("<I", data, 12)[0]
    assert json.loads(bytes(data[32 : 32 + body]))["flops"] == flops
