"""Compile every Triton kernel for A100, H100 and B200, without a GPU, and hold what it needs against limits.

    python -m benchmarks.kernel_specs [--arch 90] [operator or part of a kernel's name ...]

prints a table; exit code 1: a limit is exceeded or a kernel does not compile.  Runs in a process without
``TRITON_INTERPRET``: what Triton's interpreter takes may not compile, and the other way round.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from . import all_specs
from .spec import ARCHITECTURES, SHARED_PER_BLOCK, KernelSpec, Limits

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel on one architecture: registers and stack bytes per thread, bytes of shared
    memory per block, and tensor-core instructions in the code."""

    registers: int
    stack: int
    shared: int
    mma: int

    def exceeded(self, limits: Limits, architecture: int) -> list[str]:
        """Return a sentence for each resource that misses its limit."""
        shared = SHARED_PER_BLOCK[architecture] if limits.shared is None else limits.shared
        found = []
        for name, value, highest in (
            ("registers", self.registers, limits.registers),
            ("bytes of stack", self.stack, limits.stack),
            ("bytes of shared memory", self.shared, shared),
        ):
            if value > highest:
                found.append(f"{value} {name}: at most {highest} allowed")
        if self.mma < limits.mma:
            found.append(f"{self.mma} tensor-core instructions: at least {limits.mma} expected")
        return found


def compile_kernel(spec: KernelSpec, architecture: int) -> Usage:
    """Compile the kernel and return its resources.  Raises Triton's error if the kernel does not compile."""
    at = {name: (i,) for i, name in enumerate(spec.function.arg_names)}
    source = ASTSource(
        fn=spec.function,
        # Triton expects the order of the kernel's arguments.
        signature={name: spec.signature.get(name, "constexpr") for name in at},
        constexprs={at[name]: value for name, value in spec.constants.items()},
        attrs={at[name]: [["tt.divisibility", 16]] for name in spec.aligned},
    )
    kernel = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": spec.warps, "num_stages": spec.stages, "enable_fp_fusion": True},
    )
    registers, stack = _resources(kernel.asm["cubin"])
    return Usage(registers, stack, kernel.metadata.shared, len(MMA.findall(kernel.asm["ptx"])))


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # cuobjdump prints to stdout or to stderr.
    if found := USAGE.search(done.stdout + done.stderr):
        return int(found[1]), int(found[2])
    raise RuntimeError(f"cuobjdump -res-usage printed no usage: {done.stdout}{done.stderr}")


def check(specs: Iterable[KernelSpec], architectures: Sequence[int], console: Console) -> int:
    """Print a table of all kernels, then the failures; return the number of failures.

    A kernel fails on an architecture if the kernel does not compile or misses a limit.
    """
    table = Table("kernel", "sm", "registers", "stack", "shared KiB", "tensor core", "", box=None)
    complaints: list[str] = []
    for spec in specs:
        for architecture in sorted({*architectures} & {*spec.architectures}):
            where = f"{spec.name} on sm_{architecture}"
            try:
                usage = compile_kernel(spec, architecture)
            except (TritonError, RuntimeError) as e:  # RuntimeError comes from the compiler's passes
                table.add_row(spec.name, str(architecture), *"----", "does not compile")
                complaints.append(f"{where}: {e}")
                continue
            bad = usage.exceeded(spec.limits_on(architecture), architecture)
            numbers = (usage.registers, usage.stack, f"{usage.shared / 1024:.1f}", usage.mma)
            table.add_row(spec.name, str(architecture), *map(str, numbers), "too much" if bad else "")
            if bad:
                complaints.append(f"{where}: {'; '.join(bad)}")
    console.print(table)
    for complaint in complaints:
        console.print(complaint, style="red", markup=False, highlight=False)
    return len(complaints)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_specs", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators, or parts of kernels' names  [default: all]")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append", help="repeatable")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter's kernels do not compile; unset the variable")
    specs = [(operator, spec) for operator, specs in all_specs().items() for spec in specs]
    wanted = [s for operator, s in specs if not given.names or _named(operator, s, given.names)]
    if not wanted:
        parser.error(f"no kernel has a name like {given.names}: expected {[s.name for _, s in specs]}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    return 1 if check(wanted, given.arch or ARCHITECTURES, console) else 0


def _named(operator: str, spec: KernelSpec, names: Sequence[str]) -> bool:
    return any(name == operator or name in spec.name for name in names)
