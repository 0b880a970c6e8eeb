"""What is compiled and checked is what is launched: types, alignments, constants, warps, stages."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import Run

from vllm_hypic.backends.ops.gated_delta.triton import capture as delta_capture
from vllm_hypic.backends.ops.gated_delta.triton import channel_terms, terms
from vllm_hypic.backends.ops.gated_delta.triton import compose as delta_compose
from vllm_hypic.backends.ops.kernel_spec import SM90
from vllm_hypic.backends.ops.linear_layer.triton import convolution
from vllm_hypic.backends.ops.mamba2.triton import capture as mamba2_capture
from vllm_hypic.backends.ops.mamba2.triton import compose as mamba2_compose
from vllm_hypic.backends.ops.span_attention.triton import capture, kernels, latents, merge

ATTENTION = (capture, kernels, latents, merge)
LINEAR = (delta_capture, delta_compose, terms, channel_terms, convolution, mamba2_capture, mamba2_compose)
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
"""What an engine compiles for linear layers, however many requests and rows a step has."""


@pytest.mark.parametrize("program", ["record_launches.py", "layer_launches.py"])
def test_specs_are_launches(program: str, run_compiling: Run) -> None:
    """And no step of a running engine compiles anew for linear layers."""
    done = run_compiling(str(Path(__file__).with_name(program)), PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    found, linear = [json.loads(line) for line in done.stdout.splitlines()], program == "layer_launches.py"
    specs = [spec for module in (LINEAR if linear else ATTENTION) for spec in module.SPECS]
    specs = [spec for spec in specs if linear or SM90 in spec.architectures]
    assert specs
    for spec in specs:
        # As ``record_launches`` prints it.
        wanted = [spec.function.__name__, dict(spec.signature), sorted(spec.aligned), dict(spec.constants)]
        wanted += [spec.warps, spec.stages]
        alike = [launch for launch in found if launch[0] == wanted[0]]
        assert wanted in found, f"{spec.name}:\n{wanted}\nis none of\n{alike}"
    if linear:
        assert Counter(json.loads(one)[0] for one in {json.dumps(launch) for launch in found}) == VARIANTS
