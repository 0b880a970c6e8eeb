"""The operators in Triton as the benchmarks call them: in a process of its own, because Triton decides at its
first import whether to interpret.  What kernels compute is tested in ``../triton``, here the calls."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu.operators import INTERPRET

CODE = """
import torch
from benchmarks.gpu import delta_checks, span_checks
from benchmarks.gpu.delta_cases import DeltaCase, Segment
from benchmarks.gpu.operators import operators_for
from benchmarks.gpu.shapes import AttentionShape, DeltaShape
from benchmarks.gpu.span_cases import SpanCase, SpanRequest

torch.set_num_threads(1)
cpu, dtype = torch.device("cpu"), torch.float32
triton = operators_for(cpu)
assert triton.name == "triton"
heads, delta = AttentionShape(4, 2, 16, 8), DeltaShape(1, 1, 16, 16)
attention = SpanCase.make(heads, [SpanRequest(20, (3, 20)), SpanRequest.decode(5)], dtype, cpu)
layer = DeltaCase.make(delta, 24, 1, dtype, cpu)
found = [
    *span_checks._attend(triton, "", attention),
    *span_checks._merge(triton, cpu, dtype),
    *span_checks._capture(triton, cpu, dtype, 9),
    *span_checks._cached(triton, cpu, dtype, (4, 18)),
    *delta_checks._segments(triton, "", layer, [Segment(20, 2, 20)], (12,)),
    *delta_checks._compose(triton, "all modes", cpu, dtype, delta),
]
for f in found:
    print(f)
assert len(found) == 13 and all(f.passed for f in found)
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/cuda/gpu/test_on_gpu.py makes these calls on the GPU"
)
def test_every_operator_is_called_as_it_wants() -> None:
    environment = {**os.environ, INTERPRET: "1"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
