"""What is compiled and checked is what is launched, and no step of a running engine compiles anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from test_launches import as_launch

from vllm_hypic.backends.ops.gated_delta.triton import capture, compose, terms
from vllm_hypic.backends.ops.linear_layer.triton import convolution

MODULES = (capture, compose, convolution, terms)


def test_specs_are_launches_and_steps_compile_nothing_more(compiler_environment: dict[str, str]) -> None:
    program = Path(__file__).with_name("gated_delta_launches.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=compiler_environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    specs = [spec for module in MODULES for spec in module.SPECS]
    for spec in specs:
        wanted = as_launch(spec)
        alike = [found for found in launches if found[0] == wanted[0]]
        assert wanted in launches, f"{spec.name}:\n{wanted}\nis none of\n{alike}"
    # One per length of chunk where that matters, however many requests and rows a step has.
    by_chunk = {"terms_kernel", "compose_kernel", "convolve_kernel"}
    variants = Counter(json.loads(found)[0] for found in {json.dumps(found) for found in launches})
    assert variants == {s.function.__name__: 1 + (s.function.__name__ in by_chunk) for s in specs}
