"""What is compiled and checked is what is launched: types, alignments, constants, warps, stages."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import Run

from benchmarks.kernel_specs import all_specs
from benchmarks.kernel_specs.spec import SM90

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
    specs = [s for name, of in all_specs().items() for s in of if linear != (name == "span_attention")]
    specs = [s for s in specs if linear or SM90 in s.architectures]
    assert specs
    for spec in specs:
        # As ``record_launches`` prints it.
        wanted = [spec.function.__name__, dict(spec.signature), sorted(spec.aligned), dict(spec.constants)]
        wanted += [spec.warps, spec.stages]
        alike = [launch for launch in found if launch[0] == wanted[0]]
        assert wanted in found, f"{spec.name}:\n{wanted}\nis none of\n{alike}"
    if linear:
        assert Counter(json.loads(one)[0] for one in {json.dumps(launch) for launch in found}) == VARIANTS
