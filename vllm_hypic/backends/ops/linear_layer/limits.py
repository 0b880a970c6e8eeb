"""The check whether Triton kernels serve a linear layer. Imports no Triton: CPU installations have none."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

TAPS = range(2, 5)
STATES = (torch.float32, torch.bfloat16, torch.float16)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)
"""Lowest compute capability with TF32 and bf16 on tensor cores."""


def refuses(taps: int, conv: Tensor, state: Tensor) -> str | None:
    """Return why Triton kernels do not serve a layer with a convolution of `taps` and these vLLM caches, or
    `None` if they do.

    Each family checks its own head sizes.
    """
    device = state.device
    if device.type != "cuda":
        return f"{device.type} tensors"
    if state.dtype not in STATES:
        return f"states in {state.dtype}"
    if conv.dtype not in INPUTS:
        return f"inputs in {conv.dtype}"
    if taps not in TAPS:
        return f"a convolution of width {taps}"
    if find_spec("triton") is None:
        return "no Triton in this installation"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"a GPU of compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None
