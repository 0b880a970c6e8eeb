"""Patch: looking drafts up leaves OpenMP its number of threads.

Target: the environment variable ``NUMBA_NUM_THREADS``, which numba reads when it is imported by
``vllm.v1.spec_decode.ngram_proposer``.
Why: vLLM's n-gram proposer runs in numba, whose threads are OpenMP's where that is its threading layer.
When it first runs it sets their number, by default to that of the machine's cores, for the thread that calls.
PyTorch sets it back in the first parallel operator of another library.  Where that happens inside a pass,
the attention kernel finds another number than its plan was made for, and the engine ends.
Until: the proposer keeps numba to the threads of its process.
"""

from __future__ import annotations

import os
import sys


def apply() -> None:
    """Idempotent; before the model runner is made."""
    import torch

    # Behind its import numba takes no other number.
    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
