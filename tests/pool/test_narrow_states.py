"""S of records in float16: what is lost, and that nothing overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.narrow_states import NarrowRecords, narrowed, widened
from vllm_hypic.pool.states import (
    ConvGeometry,
    DecayGeometry,
    DiagonalGeometry,
    GatedRetentionGeometry,
    LinearGeometry,
    RetentionGeometry,
    StateGeometry,
)
from vllm_hypic.pool.tensors import DevicePool, LinearRecords

DTYPE = torch.bfloat16
FAMILIES = (
    LinearGeometry("layer", 3, 4, 5, 3, 7, DTYPE),
    DecayGeometry("layer", 4, 6, 5, 3, 8, DTYPE),
    DiagonalGeometry("layer", 6, 5, 3, DTYPE),
    RetentionGeometry("layer", 3, 4, 5),
    GatedRetentionGeometry("layer", 3, 4, 5),
)
SLOTS = 5
IDS = [type(g).__name__ for g in FAMILIES]


def pool_of(geometry: StateGeometry) -> DevicePool:
    narrow = replace(geometry, state_dtype=torch.float16)
    pool = DevicePool(PoolGeometry((), (narrow,), 4, 0, SLOTS, transition_blocks=40), torch.device("cpu"))
    for part in pool.linear["layer"].parts:
        part.view(torch.uint8).fill_(7)
    return pool


@given(exponent=st.integers(-140, 127), seed=st.integers(0, 2**16))
def test_what_is_lost(exponent: int, seed: int) -> None:
    """Heads of unlike sizes side by side, each with entries a million times smaller than its largest."""
    gen = torch.Generator().manual_seed(seed)
    state = torch.randn(2, 3, 8, 8, generator=gen).clamp(-1.9, 1.9) * 10.0 ** torch.randint(-6, 1, (8,))
    state = state.double() * 2.0 ** torch.tensor([exponent, 0, -exponent - 10.0])[:, None, None]
    state = state.clamp(-3e38, 3e38).float()
    kept, exponents = narrowed(state)
    assert kept.dtype == torch.float16 and exponents.dtype == torch.int8
    largest = state.double().abs().amax((-1, -2), keepdim=True)
    # Half a last place of ten bits; of what is small beside its head's largest, of float16's last; float32's.
    bound = state.double().abs() * 2.0**-11 + largest * 2.0**-39 + 2.0**-149
    assert ((widened(kept, exponents).double() - state.double()).abs() <= bound).all()


def test_what_float16_cannot_hold_is_held() -> None:
    """A state that was added up for long: in plain float16 it would be infinite."""
    state = torch.full((1, 2, 4, 4), 65536.0)
    state[0, 1] = 3e38
    assert state.half().isinf().all()
    kept, exponents = narrowed(state)
    assert kept.isfinite().all()
    torch.testing.assert_close(widened(kept, exponents), state, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(broken: float) -> None:
    state = torch.ones(1, 2, 4, 4)
    state[0, 0, 1, 2] = broken
    found = widened(*narrowed(state))
    assert torch.equal(found.isfinite(), state.isfinite()) and torch.equal(found[0, 1], state[0, 1])


@pytest.mark.parametrize("geometry", FAMILIES, ids=IDS)
def test_half_the_bytes(geometry: StateGeometry) -> None:
    narrow = replace(geometry, state_dtype=torch.float16)
    state, heads = geometry.parts[0].nbytes, geometry.parts[0].shape[0]
    assert narrow.slot_bytes == geometry.slot_bytes - state // 2 + heads
    assert str(narrow) == str(geometry), "records of float32 keep their names"


def test_layers_without_a_state_stay_as_they_are() -> None:
    geometry = ConvGeometry("layer", 2, 9, DTYPE)
    narrow = replace(geometry, state_dtype=torch.float16)
    assert narrow.parts == geometry.parts
    assert not isinstance(pool_of(geometry).linear["layer"], NarrowRecords)


@pytest.mark.parametrize("geometry", FAMILIES, ids=IDS)
def test_records_go_in_and_come_out(geometry: StateGeometry) -> None:
    """Captured as numbers 0 and 2 into slots 3 and 1; what else is in the pool stays as it is."""
    pool = pool_of(geometry)
    records = pool.linear["layer"]
    assert isinstance(records, NarrowRecords)
    untouched = [part[[0, 2, 4]].clone() for part in records.parts]
    room = records.room(torch.tensor([3, 0, 1]))
    gen = torch.Generator().manual_seed(2)
    for part in room.parts:
        part.copy_(torch.randn(part.shape, generator=gen))
    if isinstance(room, LinearRecords):
        room.block_of[:] = torch.tensor([[4, -1, 6], [0, 1, 2], [7, 8, -1]])
    records.write(torch.tensor([3, 1]), room, torch.tensor([0, 2]))
    found = records.read(torch.tensor([1, 3]))
    torch.testing.assert_close(found.state, room.state[[2, 0]], rtol=2.0**-11, atol=2.0**-36)
    for ours, wanted in zip(found.parts[1:], room.parts[1:], strict=True):
        assert torch.equal(ours, wanted[[2, 0]])
    if isinstance(found, LinearRecords):
        assert found.block_of.tolist() == [[7, 8, -1], [4, -1, 6]]
        assert found.transitions.data_ptr() == pool.transition_blocks.storage.data_ptr()
    for part, before in zip(records.parts, untouched, strict=True):
        assert torch.equal(part[[0, 2, 4]].view(torch.uint8), before.view(torch.uint8))
