"""What is compiled and checked is what is launched: types, alignments, constants, warps, stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_hypic.backends.ops.kernel_spec import SM90, KernelSpec
from vllm_hypic.backends.ops.span_attention.triton import cache, capture, kernels, latents, merge, pages

MODULES = (cache, capture, kernels, latents, merge, pages)


def as_launch(spec: KernelSpec) -> list[object]:
    """As ``record_launches`` prints it."""
    aligned, name = sorted(spec.aligned), spec.function.__name__
    return [name, dict(spec.signature), aligned, dict(spec.constants), spec.warps, spec.stages]


def test_specs_are_launches(compiler_environment: dict[str, str]) -> None:
    program = Path(__file__).with_name("record_launches.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=compiler_environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    specs = [spec for module in MODULES for spec in module.SPECS if SM90 in spec.architectures]
    assert specs
    for spec in specs:
        wanted = as_launch(spec)
        alike = [found for found in launches if found[0] == wanted[0]]
        assert wanted in launches, f"{spec.name}:\n{wanted}\nis none of\n{alike}"
