"""What a module of Triton kernels says about each of them, so that ``compiled`` can check it without a GPU.

A module in a folder ``triton`` that defines kernels, functions named ``*_kernel``, has a
tuple ``SPECS`` in which each of them occurs.  A spec is one specialisation: one set of constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SM80, SM90, SM100 = 80, 90, 100
ARCHITECTURES = (SM80, SM90, SM100)
"""A100, H100 and H200, B200."""

SHARED_PER_BLOCK = {SM80: 166_912, SM90: 232_448, SM100: 232_448}
"""Bytes of shared memory that a block may ask for: 163 KiB, 227 KiB."""

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Limits:
    """Highest allowed: ``registers`` and bytes of ``stack`` per thread, on which spilled registers lie; bytes
    of ``shared`` memory per block, ``None``: what the architecture has.  Lowest allowed: tensor-core
    instructions ``mma`` in the code.
    """

    registers: int = 255
    stack: int = 0
    shared: int | None = None
    mma: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel.

    ``function``: what ``triton.jit`` returned; ``signature``: type of every argument that is no constant, in
    Triton's notation (``"*bf16"``, ``"i32"``, ``"fp32"``); ``constants``: value of every other argument,
    ``None`` for a pointer that is not given; ``aligned``: arguments that are multiples of 16 (pointers: in
    bytes); ``limits``: those of architectures that differ from ``limit``; ``architectures``: where it is
    checked, fewer where it runs nowhere else or where compiling for the others would tell nothing new.
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
