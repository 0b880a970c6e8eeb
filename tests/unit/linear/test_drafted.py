"""Requests that decode with drafts: after any drafts, right or wrong, outputs and states are those of the
float64 token loop over what was accepted."""

from dataclasses import dataclass, field, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from vllm_hypic.backends.linear.drafted import Drafted, parts, special_part
from vllm_hypic.backends.linear.layout import NO_STEP, StockRows
from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, eager, native, reference
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.program import ordinary

from .layer_inputs import PAD, Layer, Shape
from .layers import relative

TOLERANCE = 1e-6
DRAFTS, TOKENS = 3, 40
SHAPES = [
    Shape(2, 4, 32, 32),
    Shape(1, 2, 96, 192, bias=False, largest_beta=2.0),
    Shape(1, 3, 64, 80, taps=2),
]
ACCEPTED = {"all": [4, 4, 4, 4], "none": [1, 1, 1, 1], "some": [2, 4, 1, 3], "without drafts": [1, 3, 1, 2]}
LENGTHS = {"all": [4, 4, 4, 4], "none": [4, 2, 3, 4], "some": [4, 4, 4, 4], "without drafts": [1, 4, 1, 2]}
"""Tokens of each step, of which the first so many are right."""


@dataclass
class Request:
    """Tokens ``first`` and on of a layer; ``done`` are behind it, and its state is in slot ``before``."""

    first: int
    slots: list[int]
    lengths: list[int]
    accepted: list[int]
    done: int = 0
    before: int = 0
    outputs: list[Tensor] = field(default_factory=list)


def run(layer: Layer, module: ModuleType, requests: list[Request], prefill: int, *, apart: bool) -> None:
    """The prompts of ``prefill`` tokens, then step by step; ``apart``: a request that decodes one token is
    special."""
    wrong = torch.randn(layer.x.mixed.shape[1], generator=torch.Generator().manual_seed(1))
    for step in range(-1, len(requests[0].lengths)):
        lengths = [prefill if step < 0 else r.lengths[step] for r in requests]
        right = [prefill if step < 0 else r.accepted[step] for r in requests]
        rows = [PAD + r.first + r.done + i for r, n in zip(requests, lengths, strict=True) for i in range(n)]
        x = layer.x.part(torch.tensor(rows))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for begin, n, stop in zip(starts, right, starts[1:], strict=False):
            x.mixed[begin + n : stop] = wrong  # `part` copies
        out = torch.full((len(rows), *layer.out.shape[1:]), torch.nan)
        drafted = Drafted(
            starts,
            [step >= 0] * len(requests),
            torch.tensor([r.slots[0] for r in requests], dtype=torch.int32),
            [*range(len(requests))] if step >= 0 else [],
            torch.tensor([r.slots for r in requests], dtype=torch.int32),
            torch.tensor([r.before or r.slots[0] for r in requests], dtype=torch.int32),
        )
        apply(layer, module, drafted, x, out, apart=apart)
        for r, n, begin in zip(requests, right, starts, strict=False):
            r.outputs.append(out[begin : begin + n])
            r.done += n
            r.before = r.slots[0] if step < 0 else r.slots[n - 1]


def apply(
    layer: Layer, module: ModuleType, drafted: Drafted, x: GatedDeltaInputs, out: Tensor, *, apart: bool
) -> None:
    """As a layer does it."""
    caches, starts = layer.caches, drafted.starts
    special = frozenset(r for r in drafted.decoding if apart and starts[r + 1] == starts[r] + 1)
    work = replace(NO_STEP, special=special)
    if special:
        whole = special_part(drafted, work, lambda rows, slots: slots)
        whole.move([caches.conv, caches.state])
        for row in special:
            token, slot = slice(starts[row], starts[row + 1]), whole.metadata[row : row + 1]
            here, program = LayerCaches(slot, caches.conv, caches.state), ordinary([0, 1], [1])
            module.gdn_compose(x.part(token), layer.weights, here, out[token], layer.records, *program)
    for part in parts(drafted, work, lambda rows, slots: (rows, slots)):
        part.move([caches.conv, caches.state])
        rows, slots = part.metadata
        assert isinstance(rows, StockRows)
        ours = out[part.tokens]
        here = LayerCaches(slots.contiguous(), caches.conv, caches.state)
        program = ordinary(rows.starts, rows.computed)
        module.gdn_compose(x.part(part.tokens), layer.weights, here, ours, layer.records, *program)
        out[part.tokens] = ours


@pytest.mark.parametrize("module", [native, eager], ids=["c++", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", ACCEPTED)
def test_drafts_leave_no_trace(module: ModuleType, shape: Shape, case: str, apart: bool) -> None:
    prefill, steps, slots = 5, len(ACCEPTED[case]), 2 * (DRAFTS + 1) + 1
    layer = Layer.make(shape, 2 * TOKENS)
    caches = [t.new_full((slots, *t.shape[1:]), torch.nan) for t in (layer.caches.conv, layer.caches.state)]
    layer = replace(layer, caches=LayerCaches(layer.caches.slots, *caches))
    first = Request(0, [3, 1, 4, 2], LENGTHS[case], ACCEPTED[case])
    # The other one is where the first is a step later: never both the same.
    turned = [*range(1, steps), 0]
    other = [[of[case][i] for i in turned] for of in (LENGTHS, ACCEPTED)]
    second = Request(TOKENS, [8, 5, 6, 7], *other)
    run(layer, module, [first, second], prefill, apart=apart)
    for request in (first, second):
        expected, state, conv = exactly(layer, request)
        assert relative(torch.cat(request.outputs), expected) < TOLERANCE
        assert relative(layer.caches.state[request.before], state) < TOLERANCE
        assert torch.equal(layer.caches.conv[request.before], conv)


def exactly(layer: Layer, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, state and the convolution's inputs behind what was accepted, by the token loop."""
    exact = layer.exact()
    caches = LayerCaches(torch.zeros(1, dtype=torch.int32), exact.caches.conv, exact.caches.state)
    rows = slice(PAD + request.first, PAD + request.first + request.done)
    out = exact.out[rows].clone()
    program = ordinary([0, request.done], [0])
    reference.gdn_compose(exact.x.part(rows), exact.weights, caches, out, exact.records, *program)
    return out, caches.state[0], caches.conv[0]
