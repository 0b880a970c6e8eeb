"""Every kernel compiles for every architecture within its limits, and the tool that says so can fail."""

import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from compilations import COMPILATIONS, Compilation
from conftest import Run

PLANTED = """
import sys
import triton
import triton.language as tl
from rich.console import Console
from benchmarks.kernel_specs import compiled
from benchmarks.kernel_specs.spec import KernelSpec, Limits

@triton.jit
def sum_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out, tl.sum(tl.load(x + at), 0))

limit = Limits(**eval(sys.argv[1]))
types, constants = {"x": "*fp32", "out": "*fp32"}, {"N": eval(sys.argv[2])}
spec = KernelSpec("sum", sum_kernel, types, constants, warps=4, stages=1, limit=limit)
sys.exit(compiled.check([spec], [90], Console(width=200)))
"""


STATES_IN_16_BITS = """
from dataclasses import replace
from benchmarks.kernel_specs import compiled, gated_delta
spec = next(s for s in gated_delta.SPECS if s.function.__name__ == "compose_kernel")
print(compiled.compile_kernel(replace(spec, signature={**spec.signature, "state_ptr": "*bf16"}), 90))
"""


@pytest.mark.parametrize("one", COMPILATIONS, ids=str)
def test_kernels_keep_their_limits(
    one: Compilation, compiled: dict[Compilation, Future[subprocess.CompletedProcess[str]]], tables: list[str]
) -> None:
    done = compiled[one].result()
    tables.append(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf" {one.architecture} +\d+ ", done.stdout)


@pytest.mark.parametrize(
    ("limits", "n", "says"),
    [
        ("{}", 256, ""),
        ("{'registers': 3}", 256, "registers: at most 3 allowed"),
        ("{'shared': 0}", 256, "bytes of shared memory: at most 0 allowed"),
        ("{'mma': 1}", 256, "0 tensor-core instructions: at least 1 expected"),
        ("{}", 255, "power of 2"),
    ],
)
def test_what_exceeds_its_limit_is_named(
    limits: str, n: int, says: str, run_compiling: Run, tmp_path: Path
) -> None:
    program = tmp_path / "planted.py"  # Triton reads a kernel's source
    program.write_text(PLANTED)
    done = run_compiling(str(program), limits, str(n), PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == (1 if says else 0), done.stdout + done.stderr
    assert says in done.stdout


def test_compositions_of_states_in_16_bits_compile(run_compiling: Run) -> None:
    """The interpreter takes what the compiler refuses: a choice between pointers of two types."""
    done = run_compiling("-c", STATES_IN_16_BITS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_refuses_to_run_in_the_interpreter(run_compiling: Run) -> None:
    done = run_compiling("-m", "benchmarks.kernel_specs", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr
