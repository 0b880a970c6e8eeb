"""The device that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import torch

MEANINGLESS = "CPU, tiny shapes: this shows that the command runs. The times mean nothing."


@dataclass(frozen=True)
class Facts:
    """What a reader must know of the device; sizes in bytes. ``meaningless``: why its times say nothing."""

    name: str
    capability: str | None
    multiprocessors: int | None
    memory: int | None
    l2_cache: int | None
    cuda: str | None
    triton: str | None
    meaningless: str | None

    @staticmethod
    def of(device: torch.device) -> Facts:
        if device.type != "cuda":
            return Facts(device.type, None, None, None, None, None, _triton(), MEANINGLESS)
        p = torch.cuda.get_device_properties(device)
        return Facts(
            p.name,
            f"{p.major}.{p.minor}",
            p.multi_processor_count,
            p.total_memory,
            p.L2_cache_size,
            torch.version.cuda,
            _triton(),
            None,
        )

    def __str__(self) -> str:
        return self.name if self.capability is None else f"{self.name}, compute capability {self.capability}"


def _triton() -> str | None:
    """Its version, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _open(_context: click.Context, _option: click.Parameter, name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "sees no GPU"
        raise click.BadParameter(
            f"torch {torch.__version__} {why}; --device cpu tries the command on tiny shapes, its times mean "
            "nothing"
        )
    return torch.device(name)


def device_option(command: Any) -> Any:
    """``--device``; reaches the command as a ``torch.device`` that exists."""
    option = click.option(
        "--device",
        type=click.Choice(["cuda", "cpu"]),
        default="cuda",
        show_default=True,
        callback=_open,
        help="cpu: tiny shapes, to try the command without a GPU.",
    )
    return option(command)
