"""Patch: the look-up of drafts leaves OpenMP's number of threads unchanged.

Target: the environment variable ``NUMBA_NUM_THREADS``, which numba reads when
``vllm.v1.spec_decode.ngram_proposer`` imports it.
Why: vLLM's n-gram proposer runs in numba, which may use OpenMP's threads.  The proposer's first run sets the
calling thread's number of threads, by default to the machine's number of cores.  PyTorch resets the number in
the first parallel operator of another library.  If the reset happens inside a pass, the number differs from
the attention kernel's plan, and the engine ends.
Until: the proposer limits numba to the threads of its process.
"""

from __future__ import annotations

import os
import sys


def apply() -> None:
    """Apply the patch, before the model runner is made; repeated calls change nothing."""
    import torch

    # Once imported, numba ignores changes of the variable.
    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
