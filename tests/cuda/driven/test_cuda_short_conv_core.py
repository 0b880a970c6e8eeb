"""The CUDA short convolution, on the CPU: which rows go where, and what comes out.

Stock vLLM's method alone is a stand-in, which believes the metadata that it is given; layer, layout,
plans and Triton operators are the real ones.  Outputs, caches and records of a mixed batch must be those of
float64.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixed_batch import (
    ALL,
    BLOCK,
    CPU,
    DECODES,
    DRAFTED,
    DRAFTED_ALONE,
    DRAFTS,
    LEFT_TO_STOCK,
    SLOTS,
    Lengths,
    accepted_,
    described,
    has_drafts,
    metadata_of,
    programs_of,
    starts_of,
    step_of,
)
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba import short_conv as stock
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.backends.ops.short_conv import Caches, Inputs, reference
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.states import ConvGeometry
from vllm_hypic.pool.step import StepContext
from vllm_hypic.pool.tensors import ConvRecords, DevicePool

SIZE, TAPS = 24, 3
NAME = "model.layers.0.conv"
LIMIT = 2e-5
"""Largest error of outputs, which are about 1; everything is computed in float32."""


def geometry(slots: int) -> PoolGeometry:
    layer = ConvGeometry(NAME, TAPS - 1, SIZE, torch.float32)
    return PoolGeometry((), (layer,), page_tokens=8, pages=0, slots=slots)


class Projection(nn.Linear):
    """As vLLM's: its result and a bias that was left out."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def exact(layer: Any, hidden: Tensor, caches: Caches, records: Any, composed: Any, segments: Any) -> Tensor:
    """The rows' outputs by the references; caches and records are written."""
    B, C, h = layer.in_proj(hidden)[0].chunk(3, dim=-1)
    x, out = Inputs(B * h, C), torch.zeros(len(hidden), SIZE, dtype=torch.float64)
    reference.short_conv_compose(x, layer.weights(), caches, out, records, *composed)
    if segments is not None:
        reference.short_conv_segments(x, layer.weights(), caches, out, records, segments)
    return out @ layer.out_proj.weight.double().T


def stock_core(layer: Any, hidden_states: Tensor, output: Tensor) -> None:
    """What vLLM computes for the batch that the metadata describes."""
    m: ShortConvAttentionMetadata = get_forward_context().attn_metadata[NAME]
    slots, program = described(m, layer.lengths)
    tokens = m.num_decode_tokens + m.num_prefill_tokens
    accepted_(layer.lengths, *layer.kv_cache)
    records = DevicePool(geometry(slots=1), CPU).records(NAME, ConvRecords)
    out = exact(layer, hidden_states[:tokens], layer.caches(slots), records, program, None)
    output[:tokens] = out.to(output.dtype)
    layer.stock_rows += tokens


class World:
    def __init__(self, lengths: Lengths = ALL) -> None:
        gen = torch.Generator().manual_seed(3)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        layer: Any = HypicCUDAShortConv.__new__(HypicCUDAShortConv)
        nn.Module.__init__(layer)
        layer.prefix, layer.L_cache, layer.stock_rows, layer.lengths = NAME, TAPS, 0, lengths
        layer.conv_dim = SIZE
        layer.cache_config = SimpleNamespace(block_size=BLOCK)
        layer.conv = nn.Module()
        layer.conv.weight, layer.conv.bias = nn.Parameter(normal(SIZE, 1, TAPS)), None
        layer.in_proj, layer.out_proj = (
            Projection(SIZE, 3 * SIZE, bias=False),
            Projection(SIZE, SIZE, bias=False),
        )
        self.layer, self.lengths = layer, lengths
        self.tokens = starts_of(lengths)[-1]
        self.slots = torch.tensor(SLOTS[: len(lengths)], dtype=torch.int32)
        self.hidden = torch.full((self.tokens + 2, SIZE), math.nan)
        self.hidden[: self.tokens] = normal(self.tokens, SIZE)
        drafts = DRAFTS if has_drafts(lengths) else 0
        conv = torch.full((9, TAPS - 1 + drafts, SIZE), math.nan)
        for (s0, _), slot in zip(lengths, SLOTS, strict=False):
            if s0:
                conv[slot, : TAPS - 1] = normal(TAPS - 1, SIZE)
        if drafts:
            conv[4, TAPS - 1] = normal(SIZE)
        layer.kv_cache = (conv,)
        self.pool = DevicePool(geometry(slots=4), CPU)
        self.tails = self.pool.records(NAME, ConvRecords).conv_tail
        self.tails.fill_(math.nan)[:2] = normal(2, TAPS - 1, SIZE)
        self.runtime, self.step = HypicRuntime(self.pool, dead_transition=0.0), step_of(lengths)
        layer.connect(self.runtime)
        self.metadata = metadata_of(ShortConvAttentionMetadata, lengths)

    def run(self, step: StepContext | None) -> Tensor:
        """vLLM's operator, as the compiled graph calls it; the rows that count."""
        self.runtime.step = step
        output = torch.zeros(self.tokens + 2, SIZE)
        context = ForwardContext(
            no_compile_layers={NAME: self.layer}, attn_metadata={NAME: self.metadata}, slot_mapping={}
        )
        with override_forward_context(context):
            stock.short_conv(self.hidden, output, NAME)
        assert not output[self.tokens :].any(), "padding was written"
        return output[: self.tokens]


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ShortConv, "forward_cuda", stock_core)
    monkeypatch.setattr(stock, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "lengths", [ALL, DECODES, DRAFTED, DRAFTED_ALONE], ids=["prefills", "decodes", "drafts", "drafts alone"]
)
def test_a_mixed_batch_is_computed_as_its_programs_say(lengths: Lengths) -> None:
    world = World(lengths)
    (conv,) = world.layer.kv_cache
    before = conv.clone()
    accepted_(lengths, before)
    caches = Caches(world.slots, before[:, : TAPS - 1])
    records = SimpleNamespace(conv_tail=world.tails.clone())
    out = exact(world.layer, world.hidden[: world.tokens], caches, records, *programs_of(lengths))
    ours = world.run(world.step)
    assert (ours.double() - out).abs().max() < LIMIT
    # What is cached went through a projection of other rows beside it.
    torch.testing.assert_close(conv[:, : TAPS - 1], caches.conv, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert conv[world.slots[2:].long(), TAPS - 1 :].isnan().all()
    torch.testing.assert_close(world.tails, records.conv_tail, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert not world.tails[2].isnan().any()
    if lengths is ALL:
        assert world.layer.stock_rows == LEFT_TO_STOCK
    assert world.runtime.calls == {"capture_linear": 1, "compose": 1} and world.layer.hypic_reached


def test_warming_up_leaves_nothing_behind() -> None:
    world = World()
    (conv,) = world.layer.kv_cache
    before, tails = conv[1:].clone(), world.tails[1:].clone()
    world.layer.warm_up(world.runtime)
    assert torch.equal(conv[1:].nan_to_num(), before.nan_to_num())
    assert torch.equal(world.tails[1:].nan_to_num(), tails.nan_to_num())


def test_a_plain_pass_is_stock_code_alone() -> None:
    world = World()
    calls: list[int] = []
    world.layer.run_stock = lambda x, out: calls.append(len(x.hidden))
    world.run(None)
    world.run(StepContext([], [], CPU, world.step.batch))
    assert calls == [len(world.hidden)] * 2 and not world.runtime.calls


def test_a_record_that_is_not_there_would_show() -> None:
    right, wrong = World(), World()
    wrong.layer.load_state_dict(right.layer.state_dict())
    wrong.tails[0] += 1
    assert (right.run(right.step) - wrong.run(wrong.step)).abs().max() > 10 * LIMIT
