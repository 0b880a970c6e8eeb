"""Saves a model with quantised weights, in formats that vLLM's CPU kernels read, and what they stand for.

Rounded to nearest, nothing is calibrated.  Only the linear layers of attention and MLP are quantised.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .tiny_models import PT, Weights, config_of

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each nibble of a word holds, the lowest first."""


@dataclass(frozen=True)
class Scheme:
    config: dict[str, Any]
    """``quantization_config`` of the model."""
    quantise: Callable[[torch.Tensor], tuple[Weights, torch.Tensor]]
    """``[N, K]`` weight -> tensors by the suffix of their names, and the weight ``[N, K]`` they stand for."""


def save_quantised(model: Path, folder: Path, name: str) -> Path:
    """Save ``model`` with weights of scheme ``name`` under ``folder / name``, and what these weights stand
    for, as an ordinary model, under ``folder / "read-back"``.  Returns the former."""
    scheme = SCHEMES[name]
    quantised, read_back = folder / name, folder / "read-back"
    for path in (quantised, read_back):
        shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    stored, meant = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        layer = key.removesuffix(".weight")
        if not layer.endswith("_proj") or ".linear_attn." in layer:
            continue
        parts, stands_for = scheme.quantise(weight.float())
        del stored[key]
        stored |= {f"{layer}.{suffix}": value.contiguous() for suffix, value in parts.items()}
        meant[key] = stands_for.to(weight.dtype).contiguous()
    save_file(stored, quantised / "model.safetensors", metadata=PT)
    save_file(meant, read_back / "model.safetensors", metadata=PT)
    with config_of(quantised) as config:
        config["quantization_config"] = scheme.config
    return quantised


def _four_bits(weight: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """``q [K, N]`` of 0..15, ``zero`` and ``scale`` ``[K / GROUP, N]``, and the weight they stand for."""
    columns, rows = weight.shape
    groups = weight.t().reshape(rows // GROUP, GROUP, columns)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / 15).clamp(min=1e-8).to(torch.float16).float()
    zero = torch.full_like(low, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    q = ((groups / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
    meant = (scale[:, None] * (q - zero[:, None])).reshape(rows, columns).t()
    return q.reshape(rows, columns).int(), zero.int(), scale.to(torch.float16), meant


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of the last axis in one word, four bits each."""
    words = values.reshape(*values.shape[:-1], -1, 8)[..., list(order)].long()
    packed = (words << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _awq(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    q, zero, scale, meant = _four_bits(weight, symmetric=False)
    return {"qweight": _packed(q, AWQ_ORDER), "qzeros": _packed(zero, AWQ_ORDER), "scales": scale}, meant


def _gptq(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    q, zero, scale, meant = _four_bits(weight, symmetric=True)
    groups = torch.arange(len(q), dtype=torch.int32) // GROUP
    parts = {"qweight": _packed(q.t()).t(), "qzeros": _packed(zero - 1), "scales": scale, "g_idx": groups}
    return parts, meant


def _eight_bits(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().clamp(-127, 127)
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP_0 = {
    "targets": ["Linear"],
    "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
    "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
}
INTEGERS: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
INTEGERS |= {"config_groups": {"group_0": GROUP_0}, "ignore": ["lm_head"]}
FOUR_BITS = {"bits": 4, "group_size": GROUP}
SCHEMES = {
    "awq": Scheme({"quant_method": "awq", "zero_point": True, "version": "gemm"} | FOUR_BITS, _awq),
    "gptq": Scheme({"quant_method": "gptq", "desc_act": False, "sym": True} | FOUR_BITS, _gptq),
    "w8a8": Scheme(INTEGERS, _eight_bits),
}
