"""What driven passes do on a GPU, and how much of its memory they take: see ``device_rules.py``."""

from functools import partial
from typing import Any

import attention_world as attention
import delta_world
import device_rules
import mamba_worlds
import pytest
import test_cuda_decode_graphs as decodes
import torch
from delta_world import BAILING, KIMI, QWEN
from device_layers import Attention, Decodes, Delta, Latents, Mamba2, ShortConv
from device_rules import OURS, UPLOADS, Device

from vllm_hypic.backends.attention import cuda_rows
from vllm_hypic.backends.linear.cuda import AtOnce
from vllm_hypic.backends.linear.gdn import cuda as delta_layer

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _stock(monkeypatch: Patch) -> None:
    """Stock code is the worlds' stand-ins."""
    delta_world.install(monkeypatch)
    mamba_worlds.install(monkeypatch)
    attention.install(monkeypatch, attention.stand_in)


QUANTISED = {"scales": attention.SCALES, "window": 20, "sinks": True}
"""What takes most: the query is copied, private and public parts are both of ours."""
PASSES = {
    "attention": Attention,
    "latents": Latents,
    "Qwen": partial(Delta, kind=QWEN, at_once=2),
    "Kimi": partial(Delta, kind=KIMI, at_once=2),
    "Bailing V3": partial(Delta, kind=BAILING, at_once=2),
    "Mamba2": Mamba2,
    "short convolutions": ShortConv,
    "decodes": Decodes,
}
ATTENTION = {"sinks": {"sinks": True}, "FP8 windows sinks": QUANTISED}
BOOKS = PASSES | {f"attention, {name}": partial(Attention, **kind) for name, kind in ATTENTION.items()}


def a_part(layer: Any) -> int:
    """Bytes of something that the layer's books count: without it, the pass would go beyond them."""
    world = layer.world
    match layer:
        case Attention():
            heads, size = attention.HEADS, attention.SIZE
            # Of the quantised pass a copy of the query.
            return int(world.starts[-1] * heads * size * world.dtype.itemsize)
        case Decodes():
            # Its result, and a copy of the query, which is in the model's dtype here.
            return 2 * decodes.ROWS * attention.HEADS * attention.SIZE * 4
        case Latents():
            return int(world.impl.row_bytes(world.dtype)) * cuda_rows.SHORTEST_OF_LATENTS * 2
        case Delta():
            return int(world.layer._summary_bytes())
        case ShortConv() | Mamba2():
            return int(world.tokens * world.width[0] * 4)
    raise TypeError(layer)


@pytest.mark.parametrize("made", BOOKS.values(), ids=BOOKS)
def test_no_pass_waits_or_takes_more_than_its_books(made: Any, monkeypatch: Patch) -> None:
    layer = made(monkeypatch)
    here = layer.run()
    assert not here.broken
    assert here.peak <= layer.bound()
    if not isinstance(layer, Attention) or layer.world.scales:
        assert here.peak > layer.bound() - a_part(layer), "books without this part would pass"


@pytest.mark.slow
@pytest.mark.parametrize("made", [partial(Attention, **QUANTISED), Latents], ids=["attention", "latents"])
def test_attention_in_one_piece_would_show(made: Any, monkeypatch: Patch) -> None:
    layer = made(monkeypatch)
    monkeypatch.setattr(cuda_rows, "PARTIAL_BYTES", 512 << 20)
    assert layer.run().peak > layer.bound()


@pytest.mark.parametrize("kept", [True, False])
def test_summaries_of_few_interiors_are_held_at_once(kept: bool, monkeypatch: Patch) -> None:
    layer = Delta(monkeypatch, QWEN, at_once=1)
    bound = layer.bound()
    if not kept:
        monkeypatch.setattr(type(layer.world.layer), "_segments_at_once", lambda self: 2)
    assert (layer.run().peak <= bound) is kept


@pytest.mark.parametrize("kept", [True, False])
def test_chunks_that_are_filled_in_part_are_in_the_books(kept: bool, monkeypatch: Patch) -> None:
    """Three segments of one row each, of which one may lack the rest of its chunk at a time."""
    layer = Delta(monkeypatch, QWEN, at_once=3, rows=1, segments=3)
    taken = layer.world.layer.terms_bytes() * 31
    assert layer.run().peak > layer.bound() - taken, "books without one of them would pass"
    few = Delta(monkeypatch, QWEN, at_once=3, rows=1, segments=3)
    monkeypatch.setattr(delta_layer, "UNFILLED_BYTES", taken)
    bound = few.bound()
    if not kept:
        monkeypatch.setattr(type(few.world.layer), "_at_once", lambda self: AtOnce())
    assert (few.run().peak <= bound) is kept


FAULTS = {
    "query[0, 0, 0].item()": "a number is read",
    "bool(query[0, 0, 0] > 0)": "a number is read",
    "query[0].tolist()": "tolist()",
    "query.cpu()": "cpu()",
    "query.float().numpy()": "numpy()",
    "query.nonzero()": "nonzero",
    "query[:, 0, 0][query[:, 0, 0] > 0]": "a mask",
    "query.new_zeros(2).copy_(torch.tensor([1, 2]))": "copy_",
    "query.index_select(0, torch.tensor([1]))": "index_select",
    "torch.tensor([1, 2], device=query.device)": "torch.tensor(",
}


@pytest.mark.slow
@pytest.mark.parametrize("made", PASSES.values(), ids=PASSES)
def test_what_is_against_the_rules_shows(made: Any, monkeypatch: Patch) -> None:
    """Planted in the forward pass, in a file of the package."""
    layer = made(monkeypatch)
    planted = [compile(fault, f"{OURS}planted_{i}.py", "eval") for i, fault in enumerate(FAULTS)]
    owner, name, rows_of = layer.planted
    right = getattr(owner, name)

    def faulty(self: Any, *given: Any) -> Any:
        rows = rows_of(*given)
        for fault in planted:
            eval(fault, {"torch": torch, "query": rows.view(len(rows), -1, 1) if rows.dim() == 2 else rows})
        return right(self, *given)

    monkeypatch.setattr(owner, name, faulty)
    found = layer.run().broken
    for i, what in enumerate(FAULTS.values()):
        mine = [line for line in found if line.startswith(f"planted_{i}.py")]
        assert any(what in line for line in mine), (what, mine)
    assert not [line for line in found if not line.startswith("planted_")]


@pytest.mark.parametrize("made", [Mamba2, ShortConv])
def test_what_stays_on_the_host_shows(made: Any, monkeypatch: Patch) -> None:
    """Tables of plans, columns and rows, were they not uploaded: kernels are given them."""
    layer = made(monkeypatch)
    monkeypatch.setattr(device_rules, "UPLOADS", [(m, n) for m, n in UPLOADS if "plan" not in m.__name__])
    assert any("a kernel is given torch.int32" in line for line in layer.run().broken)


def test_a_kernel_that_is_given_what_lies_on_the_host_shows(monkeypatch: Patch) -> None:
    layer = Attention(monkeypatch)
    uploaded = Device.own

    def own(here: Device, *given: Any) -> None:
        """All but the requests' public columns."""
        uploaded(here, *[of for of in given if not (isinstance(of, dict) and "kv_positions" in of)])

    monkeypatch.setattr(Device, "own", own)
    assert any("a kernel is given torch.int32" in line for line in layer.run().broken)
