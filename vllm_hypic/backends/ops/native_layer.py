"""The check that all C++ operators of linear layers with states share (`csrc/layer_launch.h`)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from . import extension

HEAD_MULTIPLE = 16
TAPS = range(2, 5)
INPUTS = (torch.bfloat16, torch.float32)
STATES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(
    inputs: torch.dtype,
    state: Tensor,
    states: Collection[torch.dtype] = STATES,
    taps: int = 2,
    conv: Tensor | None = None,
) -> str | None:
    """Return the reason why the C++ operators do not serve a layer, or `None` if they do.

    `inputs`: dtype of the layer's inputs; `taps`: width of the layer's convolution; `state` [slots, heads,
    rows, columns] and `conv`: vLLM's caches; `states`: dtypes that `state` may have.
    """
    rows, columns = state.shape[2:]
    if state.device.type != "cpu":
        return f"{state.device.type} tensors"
    if state.dtype not in states:
        return f"states in {state.dtype}"
    if inputs not in INPUTS:
        return f"inputs in {inputs}"
    if conv is not None and conv.dtype != inputs:
        return f"a convolution's cache in {conv.dtype} for inputs in {inputs}"
    if rows % HEAD_MULTIPLE or columns % HEAD_MULTIPLE:
        return f"head sizes {rows} and {columns}, not multiples of {HEAD_MULTIPLE}"
    if taps not in TAPS:
        return f"a convolution of width {taps}"
    return extension.missing()
