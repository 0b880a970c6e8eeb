"""What launches of the short convolution's operators would compile to on an H100, recorded without a GPU; a
program.

Prints, as JSON, one list per line, as ``record_launches`` does, once for each of several steps.  The layer is
of the size of LFM2's; nothing is compiled or computed.
"""

from __future__ import annotations

import torch
from gated_delta_launches import CPU, STEPS, programs
from linear.test_short_conv import Records
from record_launches import RECORDED, install

from vllm_hypic.backends.ops.linear_layer.triton.plan import plan_compose, plan_segments
from vllm_hypic.backends.ops.short_conv import Caches, Inputs, Weights
from vllm_hypic.backends.ops.short_conv.triton import operators

CHANNELS, TAPS = 2048, 3


def main() -> None:
    install()
    weights = Weights(torch.zeros(TAPS, CHANNELS), None)
    conv = torch.empty(1, TAPS - 1, CHANNELS, dtype=torch.bfloat16)
    for requests, rows in STEPS:
        x = torch.empty(requests * rows, CHANNELS, dtype=torch.bfloat16)
        slots = torch.zeros(requests + 1, dtype=torch.int32)[requests % 2 :]
        layer = Inputs(x, x), weights, Caches(slots, conv), x, Records(conv)
        segments, *composing = programs(requests, rows)
        operators.run(plan_segments(segments, CPU), *layer)
        operators.run(plan_compose(*composing, CPU), *layer)
    print(*RECORDED, sep="\n")


if __name__ == "__main__":
    main()
