"""Which layers the Triton kernels serve. Imports no Triton: CPU installations have none."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from .arguments import Caches, Weights

HEAD_SIZES = (16, 32, 64, 128)
TAPS = range(2, 5)
STATES = (torch.float32, torch.bfloat16, torch.float16)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)
"""TF32 and bf16 on tensor cores."""


def refuses(weights: Weights, caches: Caches) -> str | None:
    """Why the Triton operators do not serve such a layer, or `None`: they do."""
    device = caches.state.device
    heads, K, V = caches.state.shape[1:]
    if device.type != "cuda":
        return f"{device.type} tensors"
    if caches.state.dtype not in STATES:
        return f"states in {caches.state.dtype}"
    if caches.conv.dtype not in INPUTS:
        return f"inputs in {caches.conv.dtype}"
    if K not in HEAD_SIZES or V not in HEAD_SIZES:
        return f"head sizes {K} and {V}, not among {', '.join(map(str, HEAD_SIZES))}"
    if heads % weights.key_heads:
        return f"{heads} value heads, not a multiple of {weights.key_heads} key heads"
    if len(weights.weight) not in TAPS:
        return f"a convolution of width {len(weights.weight)}"
    if find_spec("triton") is None:
        return "no Triton in this installation"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"a GPU of compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None
