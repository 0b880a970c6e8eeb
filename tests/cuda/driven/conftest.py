"""Tests that run CUDA layers on the CPU, their Triton operators in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/cuda/driven

A process of its own, for what ``TRITON_INTERPRET`` says when triton is imported first holds for all of it:
``tests/cuda/test_cuda_driven.py`` starts it.  This folder must not become a package, like ``triton``.
"""

import sys
from pathlib import Path

import torch
import triton

if triton.knobs.runtime.interpret:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))

    import interpreter

    interpreter.install()
else:
    collect_ignore_glob = ["test_*.py"]
