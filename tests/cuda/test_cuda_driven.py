"""Starts the tests of ``driven/``: the layers on the CPU, their Triton operators in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_layers_driven_on_the_cpu() -> None:
    folder = Path(__file__).parent / "driven"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Not an empty run: were nothing collected, pytest would exit with 5.
    assert " passed" in done.stdout
