"""Patch: copies of blocks in vLLM's KV cache are complete.

Target: ``copy_kv_cache_blocks_inplace`` as ``vllm.v1.worker.gpu_model_runner`` calls it.
Why: in hybrid models, linear and attention layers share one memory.  The function copies the first view at
each address and skips the other views.  A view of states is narrower than a view of K and V.  After a hit
inside a block (``--prefix-match-unit``), stock vLLM 0.32 therefore reads K and V that it never copied.
Until: vLLM pull request 55112.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.worker import gpu_model_runner as runner

    @replaces(runner, runner.copy_kv_cache_blocks_inplace, "kv_caches", "num_blocks", "kv_cache_block_copies")
    def copy_blocks(stock: Any, kv_caches: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        stock(sorted(kv_caches, key=lambda view: view.nbytes, reverse=True), *args, **kwargs)
