"""States of records in pages of the pool: where they lie, and that they come back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.pool.geometry import FP8, AttentionGeometry, LatentGeometry, PoolGeometry
from vllm_hypic.pool.paged_states import PagedRecords
from vllm_hypic.pool.state_layout import layout, least_pages
from vllm_hypic.pool.states import ConvGeometry, StateGeometry
from vllm_hypic.pool.tensors import DevicePool, KeptRecords, LinearRecords

from .test_narrow_states import FAMILIES

CPU = torch.device("cpu")
PAGES, SLOTS = 200, 4
ATTENTION = (
    AttentionGeometry("attention.0", 2, 8, torch.bfloat16),
    LatentGeometry("attention.1", 1, 12, torch.bfloat16),
    AttentionGeometry("attention.2", 1, 8, FP8),
)
"""Pieces of 128, 128, 96, 32 and 32 bytes."""
KINDS: tuple[StateGeometry, ...] = (*FAMILIES, ConvGeometry("layer", 2, 9, torch.bfloat16))
IDS = [type(g).__name__ for g in KINDS]
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


def pools(layer: StateGeometry) -> tuple[DevicePool, DevicePool]:
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
@pytest.mark.parametrize("layer", KINDS, ids=IDS)
def test_as_in_a_memory_of_their_own(layer: StateGeometry, narrow: bool) -> None:
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
    used = {
        page for slot in slots.tolist() for page in range(slot, PAGES, SLOTS)[: paged.geometry.state_pages]
    }
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
