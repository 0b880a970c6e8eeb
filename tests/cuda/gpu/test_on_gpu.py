"""Every Triton operator, and the passes of a model, on a GPU against float64.

They need torch with CUDA, Triton and pytest, and neither vLLM nor the other tests' requirements::

    python -m pytest --noconftest -o addopts= tests/cuda/gpu

With ``TRITON_INTERPRET=1`` they run on the CPU in Triton's interpreter, on small shapes; not in bfloat16,
which Triton 3.9's interpreter computes wrongly.
"""

import pytest
import torch

from benchmarks.gpu import gate
from benchmarks.gpu.kernels import CHECKS, DTYPES, run_checks
from benchmarks.gpu.operators import interpreting, operators_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and not interpreting(), reason="no CUDA device, and no TRITON_INTERPRET=1"
    ),
]
DTYPES_HERE = [d for d in DTYPES if DEVICE.type == "cuda" or d != "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@pytest.mark.parametrize("kernels", CHECKS)
def test_kernels_agree_with_float64(kernels: str, dtype: str) -> None:
    with torch.inference_mode():
        found = run_checks(operators_for(DEVICE), DEVICE, [kernels], [dtype])
    assert found
    failed = [f for f in found if not f.passed]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="tests/tools/benchmarks/test_gpu_model.py does so on CPUs")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_a_model_agrees_with_float64(dtype: str, compiled: bool) -> None:
    """Raises where the ordinary or the composed pass is wrong, or a planted fault is not found."""
    with torch.inference_mode():
        assert gate.check_model(operators_for(DEVICE), DEVICE, DTYPES[dtype], compiled=compiled)
