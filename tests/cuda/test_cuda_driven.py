"""Starts tests of CUDA's code on the CPU, with Triton kernels in the interpreter.

Of our layers in ``driven/``; of what vLLM's kernels mean by their arguments in ``stock/``.
"""

import os
import sys
from pathlib import Path

import pytest
from lib import forked


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("driven", "not slow"),
        ("stock", "not slow"),
        # Faults that are planted into the layers: they show what the others would see.
        pytest.param("driven", "slow", marks=pytest.mark.slow),
    ],
    ids=["driven", "stock", "faults"],
)
def test_on_the_cpu(name: str, which: str) -> None:
    folder = Path(__file__).parent / name
    done = forked.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=3500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Not an empty run: were nothing collected, pytest would exit with 5.
    assert " passed" in done.stdout
