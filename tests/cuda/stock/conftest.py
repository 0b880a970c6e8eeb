"""Tests that run vLLM's own Triton kernels on the CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/cuda/stock

A process of its own: where no GPU is, vLLM takes no Triton, and its modules are given it here before any of
them is imported.  ``tests/cuda/test_cuda_driven.py`` starts it.  This folder must not become a package.
"""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    torch.set_num_threads(1)
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("triton", "driven")]

    import interpreter
    import vllm.triton_utils

    interpreter.install()
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
else:
    collect_ignore_glob = ["test_*.py"]


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    return tl.exp(x)


@triton.jit
def log(x: tl.tensor) -> tl.tensor:
    return tl.log(x)


@pytest.fixture(autouse=True)
def functions_that_the_interpreter_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces those of Triton's language, but not other names that modules have for them."""
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent as kimi
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    for module in (kimi, fused_recurrent):
        monkeypatch.setattr(module, "exp", exp)
    monkeypatch.setattr(kimi, "log", log)
