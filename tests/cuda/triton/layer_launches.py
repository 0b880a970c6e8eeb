"""What launches of the linear layers' operators would compile to on an H100, recorded without a GPU.

A program that prints, as JSON, one list per line, as ``record_launches`` does, once for each of several steps
that differ in the number and length of requests.  The layers are of the size of those of Qwen3-Next and
Qwen3.5; of Kimi-Linear, whose channels have a gate each; of Nemotron-H and Falcon-H1, with 64 heads of 64 in
8 groups and states of 128 or 256; and of LFM2.  Nothing is compiled or computed.
"""

import torch
from linear import layer_inputs, mamba2_inputs, test_short_conv
from record_launches import RECORDED, install

from vllm_hypic.backends.ops.gated_delta import GatedDeltaCarry, GatedDeltaInputs, GatedDeltaWeights
from vllm_hypic.backends.ops.gated_delta.triton import operators as delta_operators
from vllm_hypic.backends.ops.linear_layer.arguments import ConvolutionCaches, LayerCaches
from vllm_hypic.backends.ops.linear_layer.triton.plan import plan_compose, plan_segments
from vllm_hypic.backends.ops.mamba2 import Mamba2Carry, Mamba2Inputs, Mamba2Weights
from vllm_hypic.backends.ops.mamba2.triton import operators as mamba2_operators
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack
from vllm_hypic.backends.ops.short_conv import ShortConvInputs, ShortConvWeights
from vllm_hypic.backends.ops.short_conv.triton import operators as conv_operators

CPU, BF16 = torch.device("cpu"), torch.bfloat16
STEPS = (1, 16), (1, 40), (3, 16), (3, 50), (16, 16), (16, 64)
"""Requests and rows of each: so many segment requests, every other cut; as many composed ones."""


def programs(requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of segment requests, every other cut; rows and operations of composed ones, a record behind each."""
    segments, rows_of, ops = [], [], []
    for i in range(requests):
        first, stop, cut = i * rows, (i + 1) * rows, i % 2
        segments.append(SegmentRow(i, cut, first, stop, first, stop, 0, 0, 1 - cut, 1, 0, i if cut else -1))
        ops.append(ComposeOp(first, rows, 0, Mode.TRANSITION))
        rows_of.append(ComposeRow(i, cut, i, i + 1))
    return pack(segments, SegmentRow), pack(rows_of, ComposeRow), pack(ops, ComposeOp)


def slots_of(requests: int) -> torch.Tensor:
    """The batch's slots may begin anywhere."""
    return torch.zeros(requests + 1, dtype=torch.int32)[requests % 2 :]


def delta(requests: int, rows: int, channel_gates: bool) -> None:
    heads, K, V, taps = 32, 128, 128, 4
    tokens, key_heads = requests * rows, heads if channel_gates else 16
    channels = 2 * key_heads * K + heads * V
    b, a = torch.empty(tokens, 2 * heads, dtype=BF16).chunk(2, dim=-1)
    bias = torch.zeros(heads)
    if channel_gates:
        a, bias = torch.empty(tokens, heads, K, dtype=BF16), torch.zeros(heads, K)
    x = GatedDeltaInputs(torch.empty(tokens, channels, dtype=BF16), a, b)
    weights = GatedDeltaWeights(torch.zeros(taps, channels), None, torch.zeros(heads), bias, key_heads, 1e-6)
    conv = torch.empty(1, taps - 1, channels, dtype=BF16)
    # As vLLM has them on CUDA: states [V, K].
    caches = LayerCaches(slots_of(requests), conv, torch.empty(1, heads, V, K).transpose(2, 3))
    records = layer_inputs.Records(
        state=torch.empty(1, heads, K, V),
        conv_tail=conv,
        transitions=torch.empty(1, K, K, dtype=torch.float16),
        block_of=torch.empty(1, heads, dtype=torch.int32),
    )
    carries = [GatedDeltaCarry.beside(records.state) for _ in range(requests)]
    layer = x, weights, caches, torch.empty(tokens, heads, V, dtype=BF16), records
    segments, *composing = programs(requests, rows)
    delta_operators.run_segments(plan_segments(segments, CPU), *layer, carries)
    delta_operators.run_compose(plan_compose(*composing, CPU), *layer)


def scanned(requests: int, rows: int, N: int) -> None:
    heads, groups, P, taps = 64, 8, 64, 4
    inner, channels = heads * P, heads * P + 2 * groups * N
    # As vLLM's projection gives it: a gate, what is convolved, a step a head.
    projected = torch.empty(requests * rows, inner + channels + heads, dtype=BF16)
    x = Mamba2Inputs(*projected.split([inner, channels, heads], dim=1)[1:])
    head = torch.zeros(heads)
    weights = Mamba2Weights(torch.zeros(taps, channels), torch.zeros(channels), head, head, head, groups)
    state, conv = torch.empty(1, heads, P, N), torch.empty(1, taps - 1, channels, dtype=BF16)
    caches = LayerCaches(slots_of(requests), conv, state)
    records = mamba2_inputs.Records(state, conv, torch.empty(1, heads))
    carries = [Mamba2Carry.beside(state) for _ in range(requests)]
    out = torch.empty(requests * rows, inner, dtype=BF16).view(-1, heads, P)
    layer = x, weights, caches, out, records
    segments, *composing = programs(requests, rows)
    mamba2_operators.run_segments(plan_segments(segments, CPU), *layer, carries)
    mamba2_operators.run_compose(plan_compose(*composing, CPU), *layer)


def convolved(requests: int, rows: int) -> None:
    channels, taps = 2048, 3
    weights = ShortConvWeights(torch.zeros(taps, channels), None)
    conv = torch.empty(1, taps - 1, channels, dtype=BF16)
    x = torch.empty(requests * rows, channels, dtype=BF16)
    caches, records = ConvolutionCaches(slots_of(requests), conv), test_short_conv.Records(conv)
    layer = ShortConvInputs(x, x), weights, caches, x, records
    segments, *composing = programs(requests, rows)
    conv_operators.run(plan_segments(segments, CPU), *layer)
    conv_operators.run(plan_compose(*composing, CPU), *layer)


def main() -> None:
    install()
    for requests, rows in STEPS:
        for channel_gates in (False, True):
            delta(requests, rows, channel_gates)
        for N in (128, 256):
            scanned(requests, rows, N)
        convolved(requests, rows)
    print(*RECORDED, sep="\n")


if __name__ == "__main__":
    main()
