"""What launches of the gated delta operators would compile to on an H100, recorded without a GPU; a program.

Prints, as JSON, one list per line, as ``record_launches`` does, once for each of several steps that differ in
the number and length of requests.  The layers are of the size of those of Qwen3-Next and Qwen3.5, and of
Kimi-Linear, whose channels have a gate each; nothing is compiled or computed.
"""

from __future__ import annotations

import torch
from record_launches import RECORDED, install

from vllm_hypic.backends.ops.gated_delta import Caches, Carry, Inputs, Weights
from vllm_hypic.backends.ops.gated_delta.triton import operators
from vllm_hypic.backends.ops.linear_layer.triton.plan import plan_compose, plan_segments
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack

HEADS, K, V, TAPS = 32, 128, 128, 4
CPU = torch.device("cpu")
STEPS = (1, 16), (1, 40), (3, 16), (3, 50), (16, 16), (16, 64)
"""Requests and rows of each."""


class Records:
    def __init__(self, channels: int) -> None:
        self.state = torch.empty(1, HEADS, K, V)
        self.conv_tail = torch.empty(1, TAPS - 1, channels, dtype=torch.bfloat16)
        self.transitions = torch.empty(1, K, K, dtype=torch.float16)
        self.block_of = torch.empty(1, HEADS, dtype=torch.int32)


def step(requests: int, rows: int, channel_gates: bool) -> None:
    """So many segment requests of so many rows, every other cut; as many composed ones, of such pieces."""
    tokens, key_heads = requests * rows, HEADS if channel_gates else 16
    channels = 2 * key_heads * K + HEADS * V
    bf16 = torch.bfloat16
    gates = torch.empty(tokens, 2 * HEADS, dtype=bf16)
    b, a = gates.chunk(2, dim=-1)
    bias = torch.zeros(HEADS)
    if channel_gates:
        a, bias = torch.empty(tokens, HEADS, K, dtype=bf16), torch.zeros(HEADS, K)
    x = Inputs(torch.empty(tokens, channels, dtype=bf16), a, b)
    weights = Weights(torch.zeros(TAPS, channels), None, torch.zeros(HEADS), bias, key_heads, 1e-6)
    # As vLLM has them on CUDA: states [V, K]; the batch's slots may begin anywhere.
    state = torch.empty(1, HEADS, V, K).transpose(2, 3)
    slots = torch.zeros(requests + 1, dtype=torch.int32)[requests % 2 :]
    caches = Caches(slots, torch.empty(1, TAPS - 1, channels, dtype=bf16), state)
    out, records = torch.empty(tokens, HEADS, V, dtype=bf16), Records(channels)
    segments, *composing = programs(requests, rows)
    carries = [Carry.beside(records.state) for _ in range(requests)]
    operators.run_segments(plan_segments(segments, CPU), x, weights, caches, out, records, carries)
    operators.run_compose(plan_compose(*composing, CPU), x, weights, caches, out, records)


def programs(requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of segment requests, every other cut; rows and operations of composed ones, a record behind each."""
    segments, rows_of, ops = [], [], []
    for i in range(requests):
        first, stop, cut = i * rows, (i + 1) * rows, i % 2
        segments.append(SegmentRow(i, cut, first, stop, first, stop, 0, 0, 1 - cut, 1, 0, i if cut else -1))
        ops.append(ComposeOp(first, rows, 0, Mode.TRANSITION))
        rows_of.append(ComposeRow(i, cut, i, i + 1))
    return pack(segments, SegmentRow), pack(rows_of, ComposeRow), pack(ops, ComposeOp)


def main() -> None:
    install()
    for requests, rows in STEPS:
        for channel_gates in (False, True):
            step(requests, rows, channel_gates)
    print(*RECORDED, sep="\n")


if __name__ == "__main__":
    main()
