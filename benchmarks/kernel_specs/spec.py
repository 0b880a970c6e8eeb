"""A spec of a Triton kernel describes one specialisation, which is one set of constants, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SM80, SM90, SM100 = 80, 90, 100
ARCHITECTURES = (SM80, SM90, SM100)
"""The architectures of A100, of H100 and H200, and of B200."""

SHARED_PER_BLOCK = {SM80: 166_912, SM90: 232_448, SM100: 232_448}
"""Bytes of shared memory that a block may ask for: 163 KiB, 227 KiB."""

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of a compiled kernel.

    ``registers`` and bytes of ``stack`` (spilled registers) per thread and bytes of ``shared`` memory per
    block are the highest allowed values; ``shared=None`` stands for the architecture's limit.  ``mma`` is the
    lowest allowed number of tensor-core instructions in the code.
    """

    registers: int = 255
    stack: int = 0
    shared: int | None = None
    mma: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel.

    ``function``: the result of ``triton.jit``; ``signature``: types of all arguments that are no constants,
    in Triton's notation (``"*bf16"``, ``"i32"``, ``"fp32"``); ``constants``: values of all other arguments,
    ``None`` for an absent pointer; ``aligned``: arguments that are multiples of 16 (pointers: in bytes);
    ``limits``: limits of architectures that differ from ``limit``; ``architectures``: the checked
    architectures, without those on which the kernel never runs or a check tells nothing new.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    warps: int
    stages: int
    aligned: tuple[str, ...] = ()
    limit: Limits = field(default_factory=Limits)
    limits: Mapping[int, Limits] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES

    def __post_init__(self) -> None:
        given = [*self.signature, *self.constants]
        wanted = list(self.function.arg_names)
        if sorted(given) != sorted(wanted):
            raise ValueError(f"{self.name}: arguments {sorted(given)}, the kernel has {sorted(wanted)}")
        if unknown := set(self.aligned) - set(self.signature):
            raise ValueError(f"{self.name}: aligned arguments {sorted(unknown)} are not in the signature")

    def limits_on(self, architecture: int) -> Limits:
        return self.limits.get(architecture, self.limit)
