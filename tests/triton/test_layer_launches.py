"""What is compiled and checked is what is launched, and no step of a running engine compiles anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from test_launches import as_launch

from vllm_hypic.backends.ops.gated_delta.triton import capture, channel_terms, compose, terms
from vllm_hypic.backends.ops.linear_layer.triton import convolution
from vllm_hypic.backends.ops.mamba2.triton import capture as mamba2_capture
from vllm_hypic.backends.ops.mamba2.triton import compose as mamba2_compose

MODULES = (capture, compose, terms, channel_terms, convolution, mamba2_capture, mamba2_compose)
VARIANTS = {
    # Gated delta nets' with gates of heads and of channels, and Mamba2's with states of two sizes.
    "capture_kernel": 2 + 2,
    "records_kernel": 1,
    # One per length of chunk where that matters: segments have long ones.
    "terms_kernel": 2,
    "channel_terms_kernel": 2,
    "compose_kernel": 2 * 2 + 2 * 2,
    # Three families' convolutions: without a bias, with one, with a gate and fewer taps.
    "convolve_kernel": 2 * 3,
    "contexts_kernel": 2,
}
"""What an engine compiles, however many requests and rows a step has."""


def launches(program: str, environment: Mapping[str, str]) -> list[list[object]]:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tests / "triton" / program)],
        env={**environment, "PYTHONPATH": f"{tests}:{environment.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_specs_are_launches_and_steps_compile_nothing_more(compiler_environment: dict[str, str]) -> None:
    programs = "gated_delta_launches.py", "mamba2_launches.py", "short_conv_launches.py"
    found = [launch for program in programs for launch in launches(program, compiler_environment)]
    for spec in (spec for module in MODULES for spec in module.SPECS):
        wanted = as_launch(spec)
        alike = [launch for launch in found if launch[0] == wanted[0]]
        assert wanted in found, f"{spec.name}:\n{wanted}\nis none of\n{alike}"
    assert Counter(json.loads(one)[0] for one in {json.dumps(launch) for launch in found}) == VARIANTS
