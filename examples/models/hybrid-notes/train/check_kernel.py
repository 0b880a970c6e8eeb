"""Checks the C++ operations against PyTorch in float64: values and gradients of a model, with states reset.

The operations compute in bf16 and float32, so differences of a few per cent are theirs; an error in a
formula shows as tens of per cent.
"""

from __future__ import annotations

import sys

import torch
from model import Config, Model

TOLERANCE = 0.05  # of the norm of the exact value
ATTEMPTS = 2


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-12)).item()


def main() -> int:
    torch.manual_seed(0)
    exact = Model(Config(vocab=64), fast=False).double()
    for name, parameter in exact.named_parameters():  # away from values that hide errors, such as zeros
        if parameter.dim() == 1 and "A_log" not in name and "dt_bias" not in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    exact.model.embed_tokens.weight.data.normal_(std=1.0)
    fast = Model(Config(vocab=64))
    fast.load_state_dict({name: value.float() for name, value in exact.state_dict().items()})
    ids = torch.randint(64, (2, 45))
    keep = torch.ones(2, 45)
    keep[0, [0, 16, 29]] = keep[1, 40] = 0
    weight = torch.randn(2, 45, exact.config.hidden, dtype=torch.float64)
    outputs = []
    for model in (exact, fast):
        dtype = next(model.parameters()).dtype
        hidden = model(ids, model.context(keep.to(dtype)))
        (hidden * weight.to(dtype)).sum().backward()
        outputs.append(hidden.detach())
    found = {"output": relative(outputs[1], outputs[0])}
    for (name, parameter), other in zip(exact.named_parameters(), fast.parameters(), strict=True):
        kind = name.split(".", 3)[-1] if ".layers." in name else name
        found[kind] = max(found.get(kind, 0.0), relative(other.grad, parameter.grad))
    for name, error in found.items():
        print(f"{name:36s} {error:.4f}{'' if error < TOLERANCE else '  <-- too much'}")
    return int(max(found.values()) >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
