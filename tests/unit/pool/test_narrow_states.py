"""States of records in float16, of which something is lost, and in pages of the pool, where nothing is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_hypic.pool import states
from vllm_hypic.pool.geometry import FP8, AttentionGeometry, LatentGeometry, PoolGeometry
from vllm_hypic.pool.narrow_states import NarrowRecords, narrowed, widened
from vllm_hypic.pool.paged_states import PagedRecords, layout, least_pages
from vllm_hypic.pool.tensors import DevicePool, KeptRecords, LinearRecords

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
FAMILIES = (
    states.LinearGeometry("layer", 3, 4, 5, 3, 7, DTYPE),
    states.DecayGeometry("layer", 4, 6, 5, 3, 8, DTYPE),
    states.DiagonalGeometry("layer", 6, 5, 3, DTYPE),
    states.RetentionGeometry("layer", 3, 4, 5),
    states.GatedRetentionGeometry("layer", 3, 4, 5),
)
CONV = states.ConvGeometry("layer", 2, 9, DTYPE)
SLOTS = 5


def kind(geometry: states.StateGeometry) -> str:
    return type(geometry).__name__


def pool_of(geometry: states.StateGeometry) -> DevicePool:
    narrow = replace(geometry, state_dtype=torch.float16)
    pool = DevicePool(PoolGeometry((), (narrow,), 4, 0, SLOTS, transition_blocks=40), CPU)
    for part in pool.linear["layer"].parts:
        part.view(torch.uint8).fill_(7)
    return pool


@example(exponent=16, seed=0)  # in plain float16 it would be infinite
@example(exponent=127, seed=0)
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


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(broken: float) -> None:
    state = torch.ones(1, 2, 4, 4)
    state[0, 0, 1, 2] = broken
    found = widened(*narrowed(state))
    assert torch.equal(found.isfinite(), state.isfinite()) and torch.equal(found[0, 1], state[0, 1])


@pytest.mark.parametrize("geometry", FAMILIES, ids=kind)
def test_half_the_bytes(geometry: states.StateGeometry) -> None:
    narrow = replace(geometry, state_dtype=torch.float16)
    state, heads = geometry.parts[0].nbytes, geometry.parts[0].shape[0]
    assert narrow.slot_bytes == geometry.slot_bytes - state // 2 + heads
    assert str(narrow) == str(geometry), "records of float32 keep their names"


def test_layers_without_a_state_stay_as_they_are() -> None:
    assert replace(CONV, state_dtype=torch.float16).parts == CONV.parts
    assert not isinstance(pool_of(CONV).linear["layer"], NarrowRecords)


@pytest.mark.parametrize("geometry", FAMILIES, ids=kind)
def test_records_go_in_and_come_out(geometry: states.StateGeometry) -> None:
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


# -- in pages of the pool: where they lie, and that they come back as they were

PAGES = 250
ATTENTION = (
    AttentionGeometry("attention.0", 2, 8, DTYPE),
    LatentGeometry("attention.1", 1, 12, DTYPE),
    AttentionGeometry("attention.2", 1, 8, FP8),
)
"""Pieces of 128, 128, 96, 32 and 32 bytes."""
KINDS: tuple[states.StateGeometry, ...] = (*FAMILIES, CONV)
sizes = st.lists(st.integers(1, 12).map(lambda n: 8 * n), min_size=1, max_size=5)
parts = st.lists(st.integers(1, 2000), min_size=1, max_size=8)


@given(pieces=sizes, parts=parts)
def test_every_part_has_pieces_of_its_own(pieces: list[int], parts: list[int]) -> None:
    pages = least_pages(pieces, parts)
    found = layout(pieces, parts, pages)
    assert found is not None and layout(pieces, parts, pages - 1) is None
    taken = [
        (s.tensor, row) for extents in found for s in extents for row in range(s.first, s.first + s.count)
    ]
    assert len(set(taken)) == len(taken) and all(t < len(pieces) and row < pages for t, row in taken)
    for extents, nbytes in zip(found, parts, strict=True):
        room = sum(s.count * pieces[s.tensor] for s in extents)
        assert 0 <= room - nbytes < pieces[extents[-1].tensor]


@pytest.mark.parametrize(("pieces", "parts"), [([], [8]), ([64], []), ([64, 12], [8]), ([4], [8])])
def test_what_does_not_lie_in_pages(pieces: list[int], parts: list[int]) -> None:
    """Nothing to lie in or to lie there, or pieces that cannot hold every type of number."""
    assert least_pages(pieces, parts) == 0


def pools(layer: states.StateGeometry) -> tuple[DevicePool, DevicePool]:
    """One whose states have a memory of their own, and one where they lie in pages, full of what is no
    number."""
    own = PoolGeometry(
        ATTENTION, (layer, replace(layer, layer="other")), 4, PAGES, SLOTS, transition_blocks=40
    )
    paged = own.with_states_in_pages()
    assert paged.state_pages and paged.nbytes < own.nbytes
    made = DevicePool(own, CPU), DevicePool(paged, CPU)
    for pool in made:
        for kv in pool.kv.values():
            for part in kv.parts.values():
                part.view(torch.uint8).fill_(0xFF)
    made[1].take({slot: range(slot, PAGES, SLOTS)[: paged.state_pages] for slot in range(SLOTS)})
    return made


def random(records: KeptRecords, seed: int) -> None:
    """Into all records, whose states have a memory of their own, what any such may be."""
    gen = torch.Generator().manual_seed(seed)
    for part in records.parts:
        assert isinstance(part, torch.Tensor)
        if part.dtype == torch.int8:
            part.random_(-20, 20, generator=gen)
        else:
            part.copy_(torch.randn(part.shape, generator=gen))


def equal(one: object, other: object) -> bool:
    names = {name for name in vars(one) if name != "transitions"}
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "narrow"])
@pytest.mark.parametrize("layer", KINDS, ids=kind)
def test_as_in_a_memory_of_their_own(layer: states.StateGeometry, narrow: bool) -> None:
    """Captured, and read in any order, beside those of another layer, and none."""
    if narrow:
        layer = replace(layer, state_dtype=torch.float16)
    own, paged = pools(layer)
    slots, numbers = torch.tensor([2, 0, 3]), torch.tensor([1, 3, 0])
    for seed, name in enumerate(("layer", "other")):
        source = DevicePool(replace(own.geometry, slots=SLOTS), CPU)
        random(source.linear[name], seed)
        captured = source.linear[name]
        wide = captured.read(torch.arange(SLOTS)) if hasattr(captured, "read") else captured
        if isinstance(wide, LinearRecords):
            wide.block_of.copy_(torch.arange(SLOTS)[:, None] - 1)
        kept, mine = own.linear[name], paged.linear[name]
        assert isinstance(mine, PagedRecords)
        mine.write(slots, wide, numbers)
        mine.write(slots[:0], wide, numbers[:0])
        room = mine.room(slots)
        for field in vars(wide):
            if field != "transitions":
                assert getattr(room, field).shape[1:] == getattr(wide, field).shape[1:]
        _keep(kept, slots, wide, numbers)
    for name in ("layer", "other"):
        kept, mine = own.linear[name], paged.linear[name]
        assert isinstance(mine, PagedRecords)
        for asked in (slots, slots.flip(0), slots[1:2], torch.tensor([3, 3])):
            assert equal(mine.read(asked), _read(kept, asked))
        for part, tensor in zip(mine.parts, kept.parts, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert part[2].tobytes() == tensor[2].contiguous().view(torch.uint8).numpy().tobytes()
        assert all(not len(t) for name, t in vars(mine.read(slots[:0])).items() if name != "transitions")
    used = {page for s in slots.tolist() for page in range(s, PAGES, SLOTS)[: paged.geometry.state_pages]}
    others = torch.tensor(sorted(set(range(PAGES)) - used))
    for kv in paged.kv.values():
        for tensor in kv.parts.values():
            rows = tensor.view(torch.uint8).view(PAGES, -1)
            assert (rows[others] == 0xFF).all(), "pages of others were written"


def _keep(kept: KeptRecords, slots: torch.Tensor, captured: object, numbers: torch.Tensor) -> None:
    if hasattr(kept, "write"):
        kept.write(slots, captured, numbers)
        return
    for name, tensor in vars(kept).items():
        if name != "transitions":
            tensor[slots] = getattr(captured, name)[numbers]


def _read(kept: KeptRecords, slots: torch.Tensor) -> object:
    if hasattr(kept, "read"):
        return kept.read(slots)
    return replace(kept, **{n: t[slots] for n, t in vars(kept).items() if n != "transitions"})


def test_of_every_stage_or_of_none() -> None:
    """A stage without full attention has no pages for its states."""
    layer = KINDS[0]
    whole = PoolGeometry(ATTENTION, (layer,), 4, PAGES, SLOTS)
    names = tuple(a.layer for a in ATTENTION)
    together, apart = ((*names, "layer"),), (names, ("layer",))
    assert replace(whole, stages=together).with_states_in_pages().state_pages > 0
    assert replace(whole, stages=apart).with_states_in_pages().state_pages == 0
    assert PoolGeometry((), (layer,), 4, 0, SLOTS).with_states_in_pages().state_pages == 0
    assert PoolGeometry(ATTENTION, (), 4, PAGES, SLOTS).with_states_in_pages().state_pages == 0
