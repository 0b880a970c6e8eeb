"""Decaying linear attention whose keys are rotated: records are moved to where they are read."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.ops.decay_attention import Relocation, eager, native, reference

from .decay_inputs import POSITIONS, Layer, Shape
from .decaying import check_composed
from .layers import NONE, TRANSITION, Segment, compose_program, relative, run_compose, run_segments


@pytest.mark.parametrize("module", [reference, eager], ids=["reference", "eager"])
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.integers(0, 5),
    start=st.integers(0, 900),
    seed=st.integers(0, 1 << 16),
)
def test_composition_is_one_scan(
    module: ModuleType, lengths: list[int], window: int, start: int, seed: int
) -> None:
    """Records of a text's pieces, each made at positions of its own and moved to where it stands, and the
    windows between them: outputs and state of one scan of the rotated text."""
    total = sum(n + window for n in lengths)
    raw = Layer.make(Shape(3, 16, 8, rotated=12), total, torch.float64, seed=seed)
    here, elsewhere = raw.rotated_from(start), raw.rotated_from(0)
    whole = here.copy()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        # Its rows at positions of the text's own from 0 on.
        run_segments(module, elsewhere, [Segment(1, at + window, n, 0, n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    ours = replace(here, records=elsewhere.records)
    run_compose(module, ours, [(0, False, operations)], [start] * len(operations))
    whole.out[ours.out.isnan()] = torch.nan
    check_composed(ours, whole, [(0, False, operations)])


@pytest.mark.parametrize("neighbours", [False, True])
def test_relocation_is_rotation(neighbours: bool) -> None:
    """R(a) R(b) = R(a + b), R(0) is nothing, R(-a) R(a) too; each turns pairs and keeps their length."""
    layer = Layer.make(Shape(2, 16, 3, rotated=12, neighbours=neighbours), 1, torch.float64)
    layer.random_record(0, 0)
    S = layer.records.state[0]

    def moved(state: torch.Tensor, by: int) -> torch.Tensor:
        return Relocation(torch.tensor([by]), layer.table, neighbours).moved(state, 0)

    for a, b in ((3, 5), (1000, POSITIONS - 1001), (17, 0)):
        torch.testing.assert_close(moved(moved(S, a), b), moved(S, a + b), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moved(moved(S, a), -a), S, rtol=1e-12, atol=1e-12)
    assert moved(S, 0) is S and torch.equal(moved(S, 9)[:, 12:], S[:, 12:])
    torch.testing.assert_close(moved(S, 9).norm(), S.norm(), rtol=1e-12, atol=0)
    assert relative(moved(S, 9), S) > 0.1


@pytest.mark.parametrize("module", [native, eager], ids=["c++", "eager"])
def test_channels_that_decay_apart_cannot_be_relocated(module: ModuleType) -> None:
    layer = Layer.make(Shape(2, 16, 32, channel_gates=True), 4)
    rows, ops = compose_program([(0, False, [(0, 4, -1, NONE)])])
    relocation = Relocation(torch.zeros(1, dtype=torch.int64), layer.table)
    with pytest.raises(ValueError, match="one where channels decay apart"):
        module.decay_attention_compose(layer.x, layer.caches, layer.out, layer.records, rows, ops, relocation)
