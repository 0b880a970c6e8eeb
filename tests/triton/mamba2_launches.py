"""What launches of Mamba2's operators would compile to on an H100, recorded without a GPU; a program.

Prints, as JSON, one list per line, as ``record_launches`` does, once for each of several steps that differ in
the number and length of requests.  The layers have 64 heads of 64 in 8 groups and states of 128 or 256, as
those of Nemotron-H and Falcon-H1 do; nothing is compiled or computed.
"""

from __future__ import annotations

import torch
from gated_delta_launches import CPU, STEPS, programs
from linear.mamba2_inputs import Records
from record_launches import RECORDED, install

from vllm_hypic.backends.ops.linear_layer.triton.plan import plan_compose, plan_segments
from vllm_hypic.backends.ops.mamba2 import Caches, Carry, Inputs, Weights
from vllm_hypic.backends.ops.mamba2.triton import operators

HEADS, GROUPS, P, TAPS = 64, 8, 64, 4
BF16 = torch.bfloat16


def step(requests: int, rows: int, N: int) -> None:
    """So many segment requests of so many rows, every other cut; as many composed ones, of such pieces."""
    inner, channels = HEADS * P, HEADS * P + 2 * GROUPS * N
    # As vLLM's projection gives it: a gate, what is convolved, a step a head.
    projected = torch.empty(requests * rows, inner + channels + HEADS, dtype=BF16)
    x = Inputs(*projected.split([inner, channels, HEADS], dim=1)[1:])
    head = torch.zeros(HEADS)
    weights = Weights(torch.zeros(TAPS, channels), torch.zeros(channels), head, head, head, GROUPS)
    slots = torch.zeros(requests + 1, dtype=torch.int32)[requests % 2 :]
    state, conv = torch.empty(1, HEADS, P, N), torch.empty(1, TAPS - 1, channels, dtype=BF16)
    caches, records = Caches(slots, conv, state), Records(state, conv, torch.empty(1, HEADS))
    out = torch.empty(requests * rows, inner, dtype=BF16).view(-1, HEADS, P)
    segments, *composing = programs(requests, rows)
    carries = [Carry.beside(state) for _ in range(requests)]
    operators.run_segments(plan_segments(segments, CPU), x, weights, caches, out, records, carries)
    operators.run_compose(plan_compose(*composing, CPU), x, weights, caches, out, records)


def main() -> None:
    install()
    for N in (128, 256):
        for requests, rows in STEPS:
            step(requests, rows, N)
    print(*RECORDED, sep="\n")


if __name__ == "__main__":
    main()
